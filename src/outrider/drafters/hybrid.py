"""Drafters in turn: the first that finds something guesses alone (the hybrid of SuffixDecoding, Oliaro et al. 2024).

A look-up costs nothing and is often right where the text repeats itself, but has nothing to say elsewhere; a model
always has something to say, and costs a pass of its own each time. So the look-up is asked first, and the model where
the look-up is silent. When a member is silent is its shape's affair (``ngram@chain:8,stop=0.9``). A member is passed
over only when it has drawn nothing, so nothing drawn is ever dropped. Knows no model, shape or verifier.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.drafters.base import DraftBudget, DraftOptions, DraftSession, Proposal
from outrider.drafters.ensemble import Ensemble, EnsembleSession, MemberOptions
from outrider.trees.merge import merge
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind


class Hybrid(Ensemble):
    """One member's tree: that of the first member, in the order of ``members``, with a guess."""

    Options: ClassVar[type[DraftOptions]] = MemberOptions
    name = "hybrid"
    summary = "drafters asked in turn: the first one that finds something guesses alone"
    source = "SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975"

    @property
    def tree_size(self) -> int:
        return max(member.tree_size for member in self.members)

    def new_session(self) -> HybridSession:
        return HybridSession([member.new_session() for member in self.members], self.kind)


class HybridSession(EnsembleSession):
    """Members' sessions in the order of asking; those after the one that guessed are not asked in that step."""

    def __init__(self, members: list[DraftSession], kind: ProposalKind) -> None:
        super().__init__(members, kind, ())

    def propose(self, budget: DraftBudget) -> Proposal:
        self._forget_trees()
        for index, member in enumerate(self.members):
            tree = member.propose(budget).tree
            self._trees[index] = tree
            if tree.drafted:
                break
        # The verifier was chosen for the kind that the trees of all members can be told as.
        return Proposal(tree if tree.kind is self.kind else merge(tree, TokenTree(tree.tokens[0]), self.kind))
