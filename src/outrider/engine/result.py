"""What a request gives back: events while it runs, a result at its end."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.stats import Stats
from outrider.schedules.sequence import TokenLogprob
from outrider.types import FinishReason, StepRecord


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. ``tokens`` include a final stop token; ``text`` excludes it and any stop string.

    ``stats.lossy`` is true when the verifier may have changed what the target would have said.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    records: tuple[StepRecord, ...]
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a stream: newly printable text, its tokens, what the step did; ``result`` on the last event only."""

    text: str
    tokens: tuple[int, ...]
    record: StepRecord | None
    result: Result | None = None
