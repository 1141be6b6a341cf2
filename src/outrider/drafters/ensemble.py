"""Several drafters at once: their trees merged by common prefix (SpecInfer, Miao et al. 2024, section 3.2).

Members may be of any kind. Where one of them draws its guesses, the merged proposal is ``per_source``: every guess
stays a trial with the distribution of the member that drew it, also when two members guess the same token. Members draw
under keys of their own, independently of each other. Knows no model, shape or verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Annotated, ClassVar

from pydantic import Field

from outrider.drafters.base import (
    DraftBudget,
    DraftContext,
    Drafter,
    DraftOptions,
    DraftParts,
    DraftSession,
    Observation,
    Proposal,
)
from outrider.errors import InvalidOptionError
from outrider.sampling.draw import OffsetStream
from outrider.trees.merge import merge
from outrider.trees.shapes.base import Shape
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind


class MemberOptions(DraftOptions):
    """Options of drafters that are made of others."""

    members: Annotated[str, Field(description="drafters joined by plus signs, each with @SHAPE if wanted")] = (
        "ngram+layer_skip"
    )


class EnsembleOptions(MemberOptions):
    """Options of ``Ensemble``."""

    budget: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description="guesses kept of the union, by the members' mean path probability, decay included (members "
            "with best_first only); 0 keeps all and shares the budget among the members",
        ),
    ] = 0


class Ensemble(Drafter):
    """The union of its members' trees."""

    Options: ClassVar[type[DraftOptions]] = EnsembleOptions
    positional: ClassVar[str | None] = "members"
    samples = True
    members_option = "members"
    merges = True
    name: ClassVar[str] = "ensemble"
    summary = "several drafters' trees merged, each guess with its own source's distribution"
    source = "SpecInfer, Miao et al. 2024, arXiv:2305.09781"

    def __init__(self, options: MemberOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.members = parts.members
        if len(self.members) < 2:
            raise InvalidOptionError(
                f"{self.name} needs two members or more, got '{options.members}': {self.name}:ngram+layer_skip"
            )
        self.hidden = tuple({name: None for member in self.members for name in member.hidden})
        self.budget = options.budget if isinstance(options, EnsembleOptions) else 0
        unscored = [number for number, member in enumerate(self.members, 1) if not member.shape.scores]
        if self.budget and unscored:
            raise InvalidOptionError(
                f"{self.name}: budget={self.budget} chooses by path probability, which the shape of member "
                f"{unscored[0]} does not tell; give each one that does (MEMBER@best_first:16), or leave budget out"
            )
        is_fixed = all(member.shape.proposal is ProposalKind.DETERMINISTIC for member in self.members)
        self.kind = ProposalKind.DETERMINISTIC if is_fixed else ProposalKind.PER_SOURCE

    @property
    def tree_size(self) -> int:
        together = sum(member.tree_size for member in self.members)
        return min(self.budget, together) if self.budget else together

    def new_session(self) -> EnsembleSession:
        sizes = [member.tree_size for member in self.members]
        return EnsembleSession([member.new_session() for member in self.members], self.kind, sizes, self.budget)


class EnsembleSession(DraftSession):
    """Members' sessions side by side, the guesses that each makes at most, and the trees that they proposed last."""

    def __init__(self, members: list[DraftSession], kind: ProposalKind, sizes: Sequence[int], budget: int = 0) -> None:
        self.members = members
        self.kind = kind
        self._sizes = sizes
        self._budget = budget
        self._trees: list[TokenTree | None] = [None] * len(members)

    def begin(self, context: DraftContext) -> None:
        for index, member in enumerate(self.members):
            member.begin(replace(context, random=OffsetStream(context.random, index)))
        self._forget_trees()

    def reusable(self, prompt: Sequence[int]) -> int:
        return min(member.reusable(prompt) for member in self.members)

    def propose(self, budget: DraftBudget) -> Proposal:
        # Fixed before anything is drawn: what a member may draw never depends on another one's luck.
        most = min(self._budget, budget.max_nodes)
        shares = [most] * len(self.members) if self._budget else equal_shares(budget.max_nodes, self._sizes)
        trees = [
            member.propose(DraftBudget(share, budget.max_depth)).tree
            for member, share in zip(self.members, shares, strict=True)
        ]
        self._trees = [*trees]
        merged = reduce(lambda a, b: merge(a, b, self.kind), trees)
        return Proposal(merged.prune(mean_scores(merged, trees), most) if self._budget else merged)

    def observe(self, observation: Observation) -> None:
        accepted = observation.committed[: observation.accepted]
        for member, tree in zip(self.members, self._trees, strict=True):
            own = 0 if tree is None else len(tree.walk(accepted))
            member.observe(replace(observation, accepted=own))
        self._forget_trees()

    def end(self) -> None:
        for member in self.members:
            member.end()
        self._forget_trees()

    def _forget_trees(self) -> None:
        self._trees = [None] * len(self.members)


def mean_scores(merged: TokenTree, trees: Sequence[TokenTree]) -> list[float]:
    """Score of each node of the union, averaged over ``trees``; 0 in a tree that lacks it.

    No node scores more than its parent, since none does in any tree.
    """
    scores = [0.0] * len(merged)
    for tree in trees:
        place = [0] * len(tree)
        for node in range(1, len(tree)):
            place[node] = merged.children(place[tree.parents[node]])[tree.tokens[node]]
            scores[place[node]] += tree.scores[node] / len(trees)
    return scores


def equal_shares(budget: int, sizes: Sequence[int]) -> list[int]:
    """Equal parts of ``budget``, the odd guess first; what a small member cannot use goes to the larger ones."""
    shares = [0] * len(sizes)
    left = max(0, budget)
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for waiting, index in zip(range(len(sizes), 0, -1), smallest_first, strict=True):
        shares[index] = min(sizes[index], -(-left // waiting))
        left -= shares[index]
    return shares
