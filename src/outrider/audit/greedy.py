"""The greedy part: does every drafter asked for leave the target's greedy output as it is, and where not, why?

A difference is reported with the prompt, the position, the two tokens, their logits by the path of plain decoding (one
row) and by a pass of as many rows as the speculative step had. Only near ties are explained by rounding
(``audit/divergence.py``). Speculation is never turned down here, so that the report does not depend on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.audit.divergence import Comparison, logits_of_step
from outrider.audit.sweep import SweepRow, greedy_sweep
from outrider.engine.engine import Engine
from outrider.engine.result import Result
from outrider.errors import UsageError
from outrider.sampling.params import SamplingParams
from outrider.types import Regime


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a drafter's greedy output left the target's.

    Attributes:
        prompt, position: index of the prompt, index of the output token.
        tokens: what plain decoding and what speculation chose; ``None`` when one output merely ended earlier.
        row_logits: the two tokens' logits by the one-row path of plain decoding.
        pass_logits, pass_rows: the same by a pass of the speculative step's rows; ``None`` for the prefill's token.
        gap: distance of the best logit to the worse of the two, by the one-row path.
        tolerance: gap up to which rounding explains the difference in this precision.
    """

    prompt: int
    position: int
    tokens: tuple[int, int] | None
    row_logits: tuple[float, float] | None
    pass_logits: tuple[float, float] | None
    pass_rows: int
    gap: float
    tolerance: float

    @property
    def is_explained(self) -> bool:
        return self.gap <= self.tolerance


@dataclass(slots=True)
class GreedyRow:
    """One drafter over all prompts."""

    drafter: str
    shape: str
    prompts: int
    tokens: int
    equal_tokens: int
    drafted: int
    accepted: int
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(divergence.is_explained for divergence in self.divergences)


def greedy_audit(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[str],
    max_tokens: int,
    progress: Callable[[int, int], None] | None = None,
    params: SamplingParams | None = None,
) -> list[GreedyRow]:
    """Compare ``engine`` at temperature 0, and its target with each of ``drafters``, with plain decoding.

    Args:
        engine: the configured parts; their verifier, where it is not exact at temperature 0, gives way to ``greedy``.
        prompts: token ids.
        drafters: further drafters, as the command line takes them, with their default shapes.
        max_tokens: output tokens per prompt.
        progress: called with (prompts done, prompts in all).
        params: whose penalties and bias apply; its temperature does not.

    Raises:
        UsageError: for a drafter that cannot be built on this target.
    """
    others = (
        engine.with_parts(drafter=d, shape=None, proposal=None, verifier=None, lossy=False, adaptive=False)
        for d in drafters
        if d != engine.config.drafter
    )
    candidates = [_greedy_form(engine), *others]
    combinations = [(each, each.config.drafter, each.describe()["shape"]) for each in candidates]
    found: dict[int, list[Divergence]] = {}

    def note(which: int, prompt: int, comparison: Comparison, result: Result) -> None:
        divergence = locate(combinations[which][0], prompt, prompts[prompt], comparison, result, params)
        found.setdefault(which, []).append(divergence)

    rows = greedy_sweep(engine, prompts, combinations, max_tokens, progress, note, params)
    return [_row(row, found.get(which, [])) for which, row in enumerate(rows)]


def locate(
    engine: Engine,
    index: int,
    prompt: Sequence[int],
    comparison: Comparison,
    result: Result,
    params: SamplingParams | None = None,
) -> Divergence:
    """What happened at the first difference between plain decoding and ``result``, of prompt number ``index``."""
    position, choices = comparison.position or 0, comparison.choices
    record = next((r for r in result.records if r.position <= position < r.position + len(r.emitted)), None)
    pass_logits = None
    if choices is not None and record is not None and record.phase == "decode":
        logits = logits_of_step(engine, prompt, result.tokens, record, position)
        processed = engine.pipeline(params or SamplingParams(), prompt).process(logits, result.tokens[:position])
        pass_logits = (float(processed[choices[0]]), float(processed[choices[1]]))
    return Divergence(
        index,
        position,
        choices,
        comparison.logits,
        pass_logits,
        0 if record is None else record.drafted + 1,
        float("inf") if comparison.gap is None else comparison.gap,
        comparison.tolerance,
    )


def _greedy_form(engine: Engine) -> Engine:
    try:
        if not engine.lane(Regime.GREEDY).verifier.lossy:
            return engine.with_parts(adaptive=False)
    except UsageError:  # the configured rule is for sampling alone
        pass
    return engine.with_parts(verifier=None, proposal=None, lossy=False, adaptive=False)


def _row(row: SweepRow, divergences: list[Divergence]) -> GreedyRow:
    return GreedyRow(
        row.drafter, row.shape, row.prompts, row.tokens, row.equal_tokens, row.drafted, row.accepted, divergences
    )
