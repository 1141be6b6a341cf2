"""The greedy sweep: does every drafter and shape leave the target's greedy output unchanged, on real prompts?

Each prompt is decoded plainly once, then with every combination; a difference is located and its logit gap measured
(``audit/divergence.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.audit.divergence import Comparison, compare_outputs
from outrider.engine.engine import Engine
from outrider.engine.result import Result
from outrider.sampling.params import SamplingParams


@dataclass(slots=True)
class SweepRow:
    """One combination over all prompts. ``near_ties`` and ``unexplained`` hold (prompt index, comparison)."""

    drafter: str
    shape: str
    prompts: int = 0
    tokens: int = 0
    equal_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    near_ties: list[tuple[int, Comparison]] = field(default_factory=list)
    unexplained: list[tuple[int, Comparison]] = field(default_factory=list)

    def add(self, index: int, comparison: Comparison, tokens: int, drafted: int, accepted: int) -> None:
        """Count one prompt."""
        self.prompts += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        self.equal_tokens += tokens if comparison.is_identical else comparison.position or 0
        if not comparison.is_identical:
            (self.near_ties if comparison.is_near_tie else self.unexplained).append((index, comparison))


def greedy_sweep(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    combinations: Sequence[tuple[Engine, str, str]],
    max_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
    on_difference: Callable[[int, int, Comparison, Result], None] | None = None,
    params: SamplingParams | None = None,
) -> list[SweepRow]:
    """Compare every combination with plain decoding.

    Args:
        engine: any engine on the target; its plain form is the reference.
        prompts: token ids.
        combinations: (engine on the same target, drafter's name, shape's name) to compare.
        max_tokens: output tokens per prompt.
        progress: called with (prompts done, prompts in all).
        on_difference: called with (index of the combination, of the prompt, comparison, the combination's result).
        params: penalties and the like; temperature and length are set here.
    """
    params = (params or SamplingParams()).model_copy(update={"temperature": 0.0, "max_tokens": max_tokens})
    plain = engine.plain()
    rows = [SweepRow(drafter, shape) for _, drafter, shape in combinations]
    for index, prompt in enumerate(prompts):
        reference = plain.generate(prompt, params)
        for which, (row, (candidate, _, _)) in enumerate(zip(rows, combinations, strict=True)):
            result = candidate.generate(prompt, params)
            comparison = compare_outputs(plain, prompt, reference.tokens, result.tokens, params)
            stats = result.stats
            row.add(index, comparison, len(result.tokens), stats.num_draft_tokens, stats.num_accepted_tokens)
            if on_difference is not None and not comparison.is_identical:
                on_difference(which, index, comparison, result)
        if progress is not None:
            progress(index + 1, len(prompts))
    return rows
