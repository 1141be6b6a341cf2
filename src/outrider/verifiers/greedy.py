"""Greedy verification: keep the guesses that equal the target's best token (Leviathan et al. 2023, the limit T -> 0).

Exact for every proposal at temperature 0 because nothing about the output is random there. Knows no model; ties are
broken by the target's ``greedy_token``, the same function that plain decoding uses.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.sampling.draw import RandomStream
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Exactness, TargetDistributions, Verdict, Verifier, exactness


class Greedy(Verifier):
    """Descend to the child that carries the target's best token; emit the first best token that has no child."""

    exact_for: ClassVar[Exactness] = exactness(list(ProposalKind), list(Topology), [Regime.GREEDY])
    summary = "keep guesses equal to the target's best token (temperature 0)"
    source = "Leviathan et al. 2023, arXiv:2211.17192"

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            token = target.greedy_token(node)
            child = tree.children(node).get(token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            node = child
