"""Sample matching (SpecExec, Svirschevski et al. 2024, arXiv:2406.02532): the target's own sample walks down the tree.

At every visited node one token is drawn from the target's distribution there; while that token is a child, it is
accepted and the walk goes on. What the proposal was drawn from plays no part, so any tree is exact. The draw for
output index i has the key that plain sampling uses for index i (``sampling/draw.py``): with a seed the text is plain
sampling's text, not only its law. Knows no model, cache, clock or q.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.sampling.draw import RandomStream, Role
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Exactness, TargetDistributions, Verdict, Verifier, exactness


class SampleMatch(Verifier):
    """Draw the target's token at each node; descend while it is a child."""

    exact_for: ClassVar[Exactness] = exactness(list(ProposalKind), list(Topology), list(Regime))
    seed_fixes_text = True
    summary = "the target's own sample walks down the tree: a seed gives plain sampling's text"
    source = "SpecExec, Svirschevski et al. 2024, arXiv:2406.02532"

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            token = random.categorical(target.probabilities(node), position + len(path), Role.TARGET, 0)
            child = tree.children(node).get(token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node = child
