"""``combine``: statistics of several requests are the fold of all their records."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.stats import Stats, combine, fold
from outrider.types import StepRecord, StepTimes

# Multiples of 1/8 add up exactly in any order, so that equality below is equality.
seconds = st.integers(0, 80).map(lambda eighths: eighths / 8)
times = st.builds(StepTimes, seconds, seconds, seconds, seconds)


@st.composite
def decode_records(draw: st.DrawFn) -> StepRecord:
    drafted = draw(st.integers(0, 9))
    accepted = draw(st.integers(0, drafted))
    kept = draw(st.integers(1, accepted + 1))
    emitted = tuple(range(kept))
    return StepRecord("decode", 1, drafted, accepted, emitted, 1, accepted + 1 - kept, times=draw(times))


@st.composite
def requests(draw: st.DrawFn) -> list[StepRecord]:
    first = draw(st.integers(0, 1))
    prefill = StepRecord("prefill", 0, 0, 0, (5,) * first, trimmed=1 - first, times=draw(times))
    return [prefill, *(draw(st.lists(decode_records(), max_size=6)) if first else [])]


@given(st.lists(st.tuples(requests(), st.integers(1, 50)), max_size=5))
def test_combined_is_the_fold_of_all_records(made: list[tuple[list[StepRecord], int]]) -> None:
    every = fold((record for records, _ in made for record in records), sum(length for _, length in made))
    assert combine(fold(records, length) for records, length in made) == every


@given(st.lists(requests(), max_size=5))
def test_one_at_a_time_is_all_at_once(made: list[list[StepRecord]]) -> None:
    parts = [fold(records, 3) for records in made]
    total = combine(())
    for part in parts:
        total = combine((total, part))
    assert total == combine(parts)


def test_no_request() -> None:
    nothing = combine(())
    assert nothing == Stats(0, 0, 0, 0, 0, 0, (), 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    assert nothing.tokens_per_second == 0.0


def test_means_are_weighted_by_hand() -> None:
    step = StepRecord("decode", 1, 4, 2, (1, 2, 3), times=StepTimes(target=1.0))
    one = fold([StepRecord("prefill", 0, 0, 0, (9,)), step], 10)
    other = fold([StepRecord("prefill", 0, 0, 0, (9,)), *[replace(step, drafted=2, accepted=0, emitted=(1,))] * 3], 20)
    both = combine([one, other])
    assert (both.prompt_tokens, both.output_tokens, both.num_first_tokens) == (30, 8, 2)
    assert both.mean_acceptance_length == (3 + 1 + 1 + 1) / 4  # not (3.0 + 1.0) / 2
    assert both.draft_acceptance_rate == 2 / 10
    assert both.num_accepted_tokens_per_pos == (1, 1)
    assert both.tokens_per_second == 6 / 4.0  # neither request's first token is decoded


def test_large_counts_stay_exact() -> None:
    part = replace(combine(()), num_drafts=3 * 10**9 + 1, mean_acceptance_length=(7 * 10**9) / (3 * 10**9 + 1))
    assert combine([part, part]).mean_acceptance_length == part.mean_acceptance_length
