"""An oracle with a chosen acceptance rate, for tests, benchmarks and demonstrations; never a speed-up.

It runs the target itself, behind the committed prefix and rolled back afterwards, and offers the target's best
continuation at every node with probability ``rate``; otherwise the best token is left out and the second best leads. So
each guess costs a target forward. At temperature 0 a chain's guess is accepted with probability exactly ``rate``; above
0 the verifier still has its say. Deterministic: its candidates are ranked, never drawn from a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession
from outrider.drafters.model_source import ModelSource
from outrider.sampling.draw import Role
from outrider.trees.shapes.base import Candidates, GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

_RANKED = 16
"""Candidates offered at a node: more than any shape takes in a test."""


class ReplayOptions(DraftOptions):
    """Options of ``Replay``."""

    rate: Annotated[float, Field(ge=0.0, le=1.0, description="probability of offering the target's best token")] = 0.8


class Replay(Drafter):
    """Offers the target's own best token at a chosen rate."""

    Options: ClassVar[type[DraftOptions]] = ReplayOptions
    positional: ClassVar[str | None] = "rate"
    summary = "the target's own best tokens at a chosen rate (an oracle for tests and benchmarks, not a speed-up)"
    source = "test instrument"

    def __init__(self, options: ReplayOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.rate = options.rate

    def new_session(self) -> _ReplaySession:
        return _ReplaySession(self.shape, self.rate)


class _ReplaySession(GrowingSession):
    def __init__(self, shape: Shape, rate: float) -> None:
        super().__init__(shape)
        self._rate = rate

    def grow(self, limits: GrowLimits) -> TokenTree:
        source = _TargetSource(self.context, self.output, self._rate)
        with self.context.target_cache.speculation():
            return self.shape.grow(self.tokens[-1], source, limits)


class _TargetSource:
    """The target's ranking at each node, its best token left out at the chosen rate."""

    name = "replay"

    def __init__(self, context: DraftContext, output: Sequence[int], rate: float) -> None:
        self._target = ModelSource(self.name, context.target, context.target_cache, context.pipeline, output)
        self._random = context.random
        self._kept = len(output)
        self._rate = rate

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        rows = self._target.evaluate(tree, nodes)
        return [self._rank(tree, node, row) for node, row in zip(nodes, rows, strict=True)]

    def _rank(self, tree: TokenTree, node: int, logits: Tensor) -> Candidates:
        pipeline, output = self._target.pipeline, self._target.above(tree, node)
        best = pipeline.greedy_token(logits, output)
        scores = torch.softmax(pipeline.process(logits, output).double(), dim=-1)
        values, order = torch.topk(scores, min(_RANKED, scores.shape[-1]))
        ranked = [(t, s) for t, s in zip(order.tolist(), values.tolist(), strict=True) if t != best]
        if self._random.bernoulli(self._rate, self._kept, Role.DRAFT, node):
            ranked.insert(0, (best, float(scores[best])))
        return Candidates([token for token, _ in ranked], [score for _, score in ranked])
