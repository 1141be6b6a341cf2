"""An oracle with a chosen acceptance rate, for tests, benchmarks and demonstrations; never a speed-up.

It runs the target itself, behind the committed prefix and rolled back afterwards, and offers the target's best
continuation at every node with probability ``rate``; otherwise the best token is left out and the second best leads. So
each guess costs a target forward. At temperature 0 a chain's guess is accepted with probability exactly ``rate``; above
0 the verifier still has its say. Deterministic: its candidates are ranked, never drawn from a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from outrider.drafters.base import DraftBudget, DraftContext, Drafter, DraftOptions, DraftSession, Observation, Proposal
from outrider.models.base import LanguageModel, Segment
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
    """Evaluates nodes with the target as they are asked for; scratch slots follow the order of asking."""

    name = "replay"

    def __init__(self, context: DraftContext, output: Sequence[int], rate: float) -> None:
        self._context = context
        self._output = output
        self._rate = rate
        self._slots: dict[int, int] = {}

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        cache = self._context.target_cache
        before = cache.scratch
        self._slots.update({node: before + row for row, node in enumerate(nodes)})
        mask = np.zeros((len(nodes), before + len(nodes)), dtype=np.bool_)
        for row, node in enumerate(nodes):
            mask[row, [self._slots[above] for above in (0, *tree.path(node))]] = True
        tokens = [tree.tokens[node] for node in nodes]
        positions = [cache.length + tree.depths[node] for node in nodes]
        (out,) = self._context.target.forward([Segment(cache, tokens, positions, mask)])
        return [self._rank(tree, node, out.logits[row]) for row, node in enumerate(nodes)]

    def _rank(self, tree: TokenTree, node: int, logits: torch.Tensor) -> Candidates:
        output = [*self._output, *tree.path_tokens(node)]
        pipeline = self._context.pipeline
        best = pipeline.greedy_token(logits, output)
        scores = torch.softmax(pipeline.process(logits, output).double(), dim=-1)
        values, order = torch.topk(scores, min(_RANKED, scores.shape[-1]))
        ranked = [(t, s) for t, s in zip(order.tolist(), values.tolist(), strict=True) if t != best]
        if self._context.random.bernoulli(self._rate, len(self._output), Role.DRAFT, node):
            ranked.insert(0, (best, float(scores[best])))
        return Candidates([token for token, _ in ranked], [score for _, score in ranked])
