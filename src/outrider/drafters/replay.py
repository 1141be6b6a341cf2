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

from outrider.drafters.base import DraftBudget, DraftContext, Drafter, DraftOptions, DraftSession, Observation, Proposal
from outrider.drafters.model_source import ModelSource
from outrider.models.base import LanguageModel
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

    def __init__(
        self, options: ReplayOptions, shape: Shape, target: LanguageModel, draft_model: LanguageModel | None = None
    ) -> None:
        super().__init__(options, shape, target, draft_model)
        self.rate = options.rate

    def new_session(self) -> _ReplaySession:
        return _ReplaySession(self.shape, self.rate)


class _ReplaySession(DraftSession):
    def __init__(self, shape: Shape, rate: float) -> None:
        self._shape = shape
        self._rate = rate
        self._context: DraftContext | None = None
        self._output: list[int] = []

    def begin(self, context: DraftContext) -> None:
        self._context = context
        self._output = []

    def propose(self, budget: DraftBudget) -> Proposal:
        if self._context is None:
            raise ValueError("propose before begin")
        root = self._output[-1] if self._output else self._context.prompt[-1]
        limits = GrowLimits(budget.max_nodes, budget.max_depth, len(self._output), self._context.random)
        source = _TargetSource(self._context, self._output, self._rate)
        with self._context.target_cache.speculation():
            return Proposal(self._shape.grow(root, source, limits))

    def observe(self, observation: Observation) -> None:
        self._output.extend(observation.committed)

    def end(self) -> None:
        self._context = None


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
