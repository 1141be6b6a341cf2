"""Verifiers whose output is a known total variation away from the target's, to see whether the audit notices."""

from __future__ import annotations

from typing import ClassVar

from outrider.sampling.draw import RandomStream, Role
from outrider.trees.token_tree import TokenTree
from outrider.verifiers.base import TargetDistributions, Verdict
from outrider.verifiers.multi_step import MultiStep

_FREE_KEY = 2**30
"""A draw counter that no production code uses."""


class Biased(MultiStep):
    """Moves ``bias`` of the mass of a step's first token to the target's best token: that much total variation."""

    bias: ClassVar[float] = 0.0

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        p = target.probabilities(0)
        best = int(p.argmax())
        share = self.bias / max(1e-9, 1.0 - float(p[best]))
        if random.bernoulli(share, position, Role.ACCEPT, _FREE_KEY):
            return Verdict((), best)
        return super().verify(tree, target, random, position)


class BiasedBy10Percent(Biased):
    bias = 0.10
    summary = "10% of total variation"
    source = "test"


class BiasedBy1Percent(Biased):
    bias = 0.01
    summary = "1% of total variation"
    source = "test"
