"""Where two greedy outputs of the same target part, and whether a near tie of its two best logits explains it.

Finite precision makes a product's last bits depend on how many rows it has (a tree has several, plain decoding one).
Where the two best logits are closer than that noise, either token is the target's argmax; anything wider is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.engine import Engine
from outrider.models.base import LanguageModel, Segment, SequenceCache, extend_cache, tree_segment
from outrider.sampling.params import SamplingParams
from outrider.trees.token_tree import TokenTree
from outrider.types import StepRecord

NEAR_TIE = {torch.float64: 1e-9, torch.float32: 5e-4, torch.bfloat16: 0.75, torch.float16: 0.1}
"""Gap between the two best logits under which their order is noise; measured in ``docs/guarantees.md``."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs. ``position`` is the first output index that differs, ``gap`` the best two logits' distance there.

    ``choices`` are the tokens of the first and the second output there, ``logits`` theirs by the one-row path.
    """

    is_identical: bool
    tokens: int
    position: int | None = None
    gap: float | None = None
    tolerance: float = 0.0
    choices: tuple[int, int] | None = None
    logits: tuple[float, float] | None = None

    @property
    def is_near_tie(self) -> bool:
        """Whether the difference is explained."""
        return self.gap is not None and self.gap <= self.tolerance

    def describe(self) -> str:
        """One sentence."""
        if self.is_identical:
            return f"outputs are identical ({self.tokens} tokens)"
        if self.choices is None:
            return f"one output ends after {self.position} equal tokens and the other goes on: please report this"
        verdict = "a near tie" if self.is_near_tie else "NOT a near tie: please report this"
        return (
            f"outputs first differ at token {self.position}: the target's logits for the two choices are "
            f"{self.gap:.2g} apart there, {verdict} (tolerance {self.tolerance:g})"
        )


@torch.inference_mode()
def compare_outputs(
    engine: Engine,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    params: SamplingParams | None = None,
) -> Comparison:
    """Compare two greedy outputs for the same prompt tokens; evaluates the target once where they part.

    The gap is between the logits of the two tokens that were chosen, after the penalties and bias of ``params``, by
    the one-row path of plain decoding.
    """
    shortest = min(len(first), len(second))
    position = next((i for i in range(shortest) if first[i] != second[i]), shortest)
    if position == shortest and len(first) == len(second):
        return Comparison(True, shortest)
    tolerance = NEAR_TIE[engine.model.dtype]
    if position == shortest:
        return Comparison(False, shortest, position, float("inf"), tolerance)
    logits = _logits_after(engine.model, [*prompt, *first[:position]])
    pipeline = engine.pipeline(params or SamplingParams(), prompt)
    logits = pipeline.process(logits, first[:position]).double()
    chosen = (first[position], second[position])
    best = float(logits.max())
    # Both choices must be near the best: a token that merely ties with another loser explains nothing.
    values = (float(logits[chosen[0]]), float(logits[chosen[1]]))
    return Comparison(False, shortest, position, best - min(values), tolerance, chosen, values)


@torch.inference_mode()
def logits_of_step(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], record: StepRecord, position: int
) -> Tensor:
    """The target's logits [vocabulary], penalties and bias not applied, for output token ``position``, computed anew.

    By a pass of as many rows, under the same mask, as the decoding step ``record`` had that emitted that token.
    """
    cache = _prefilled(engine.model, [*prompt, *output[: record.position - 1]])
    tree = TokenTree(record.tokens[0])
    for token, parent in zip(record.tokens[1:], record.parents[1:], strict=True):
        tree.add(parent, token)
    node = (0, *record.accepted_path)[position - record.position]
    return engine.model.forward([tree_segment(cache, tree, [node])])[0].logits[0]


def _logits_after(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """The target's logits [vocabulary] after ``tokens``, the last one evaluated alone."""
    return model.forward([Segment(_prefilled(model, tokens[:-1]), tokens[-1:])])[0].logits[0]


def _prefilled(model: LanguageModel, tokens: Sequence[int]) -> SequenceCache:
    cache = model.new_cache()
    extend_cache(model, cache, tokens)
    return cache
