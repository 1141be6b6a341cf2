"""Statistics of a generation: folds over step records, under vLLM's names and definitions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import zip_longest

from outrider.types import StepRecord


@dataclass(frozen=True, slots=True)
class Stats:
    """What a request (or several) did.

    ``num_drafts`` counts steps that drafted anything; ``num_accepted_tokens`` counts accepted guesses that were kept;
    ``mean_acceptance_length`` is tokens kept per such step, the bonus token included (1.0 means no guess was kept).
    Seconds are wall clock; ``prefill_seconds`` covers the pass that reads the prompt and emits the first token
    (``num_first_tokens``: 1 a request, 0 where a stop condition trimmed it).
    ``tokens_per_second`` is the decode rate: tokens after the first one over ``decode_seconds``. ``lossy`` says that
    the verifier may have changed what the target would have said.
    """

    prompt_tokens: int
    output_tokens: int
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    mean_acceptance_length: float
    draft_acceptance_rate: float
    prefill_seconds: float
    draft_seconds: float
    target_seconds: float
    verify_seconds: float
    other_seconds: float
    num_first_tokens: int = 1
    lossy: bool = False

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.verify_seconds + self.other_seconds

    @property
    def tokens_per_second(self) -> float:
        decoded = self.output_tokens - self.num_first_tokens
        return decoded / self.decode_seconds if decoded > 0 and self.decode_seconds > 0 else 0.0

    @property
    def acceptance_per_pos(self) -> tuple[float, ...]:
        """Share of drafting steps in which the first 1, 2, ... guesses of a path were all accepted."""
        return tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)

    @property
    def conditional_acceptance_per_pos(self) -> tuple[float, ...]:
        """Share of the steps that accepted the guesses before it in which the guess at a depth was accepted too."""
        before = (self.num_drafts, *self.num_accepted_tokens_per_pos)
        return tuple(count / known for count, known in zip(self.num_accepted_tokens_per_pos, before, strict=False))

    def to_dict(self) -> dict[str, object]:
        """Every figure, for JSON."""
        names = ("decode_seconds", "tokens_per_second", "acceptance_per_pos", "conditional_acceptance_per_pos")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def fold(records: Iterable[StepRecord], prompt_tokens: int, lossy: bool = False) -> Stats:
    """Statistics of one request's records."""
    output = first = drafts = drafted = accepted = kept_in_drafts = steps = 0
    prefill = draft = target = verify = other = 0.0
    per_position: list[int] = []
    for record in records:
        output += len(record.emitted)
        if record.phase == "prefill":
            first += len(record.emitted)
            prefill += record.times.total
            continue
        steps += 1
        draft += record.times.draft
        target += record.times.target
        verify += record.times.verify
        other += record.times.other
        if record.drafted:
            kept = min(record.accepted, len(record.emitted))
            drafts += 1
            drafted += record.drafted
            accepted += kept
            kept_in_drafts += len(record.emitted)
            per_position.extend([0] * (kept - len(per_position)))
            for position in range(kept):
                per_position[position] += 1
    return Stats(
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        num_steps=steps,
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=tuple(per_position),
        mean_acceptance_length=kept_in_drafts / drafts if drafts else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        prefill_seconds=prefill,
        draft_seconds=draft,
        target_seconds=target,
        verify_seconds=verify,
        other_seconds=other,
        num_first_tokens=first,
        lossy=lossy,
    )


def combine(stats: Iterable[Stats]) -> Stats:
    """Statistics of several requests together: what ``fold`` of all their records would give.

    Counts and seconds are added, counts per position place by place. The means are those of the whole, not means of
    means: tokens kept over all steps that drafted, guesses accepted over all guesses. Of no request: counts of 0.
    """
    parts = list(stats)
    drafts = sum(part.num_drafts for part in parts)
    drafted = sum(part.num_draft_tokens for part in parts)
    accepted = sum(part.num_accepted_tokens for part in parts)
    # A quotient of integers times its denominator is off by less than 1/2, so rounding gives the integer back.
    kept_in_drafts = sum(round(part.mean_acceptance_length * part.num_drafts) for part in parts)
    positions = zip_longest(*(part.num_accepted_tokens_per_pos for part in parts), fillvalue=0)
    return Stats(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        num_steps=sum(part.num_steps for part in parts),
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=tuple(map(sum, positions)),
        mean_acceptance_length=kept_in_drafts / drafts if drafts else 1.0,
        draft_acceptance_rate=accepted / drafted if drafted else 0.0,
        prefill_seconds=sum(part.prefill_seconds for part in parts),
        draft_seconds=sum(part.draft_seconds for part in parts),
        target_seconds=sum(part.target_seconds for part in parts),
        verify_seconds=sum(part.verify_seconds for part in parts),
        other_seconds=sum(part.other_seconds for part in parts),
        num_first_tokens=sum(part.num_first_tokens for part in parts),
        lossy=any(part.lossy for part in parts),
    )
