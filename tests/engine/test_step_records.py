"""Invariant 6: what a step says it did adds up, and the statistics are folds of that under vLLM's definitions."""

from __future__ import annotations

import json

import pytest

from engine.tiny_engines import ScriptModel, build_engine, combinations, random_prompts
from outrider.engine.result import Result
from outrider.engine.stats import fold
from outrider.sampling.params import SamplingParams
from outrider.types import Regime, StepRecord, StepTimes

PROMPTS = random_prompts(3, 12, seed=21)


def check_records(result: Result) -> None:
    """Every identity of ``StepRecord`` and ``Stats``."""
    assert result.records[0].phase == "prefill"
    position = 0
    for record in result.records:
        assert record.position == position
        assert record.bonus == 1
        assert 0 <= record.accepted == len(record.accepted_path) <= record.drafted == len(record.tokens) - 1
        assert len(record.emitted) == record.accepted + record.bonus - record.trimmed >= 1
        assert record.phase == "decode" or (record.position == record.drafted == 0)
        # The accepted path is a path of the tree, and what it spells was emitted (but for what a stop cut off).
        assert [record.parents[n] for n in record.accepted_path] == [0, *record.accepted_path][: record.accepted]
        spelled = tuple(record.tokens[n] for n in record.accepted_path)
        assert record.emitted[: record.accepted] == spelled[: len(record.emitted)]
        assert len(record.sources) == len(record.tokens)
        assert all(source for source in record.sources[1:])
        times = record.times
        assert min(times.draft, times.target, times.verify, times.other) >= 0
        assert times.total == pytest.approx(times.draft + times.target + times.verify + times.other)
        position += len(record.emitted)
    assert tuple(t for record in result.records for t in record.emitted) == result.tokens
    check_stats(result)


def check_stats(result: Result) -> None:
    stats, steps = result.stats, [r for r in result.records if r.phase == "decode"]
    drafting = [r for r in steps if r.drafted]
    assert stats.output_tokens == len(result.tokens)
    assert stats.num_steps == len(steps)
    assert stats.num_drafts == len(drafting)
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens == sum(r.drafted for r in steps)
    assert 0.0 <= stats.draft_acceptance_rate <= 1.0
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert list(stats.num_accepted_tokens_per_pos) == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    if drafting:
        assert stats.mean_acceptance_length == sum(len(r.emitted) for r in drafting) / len(drafting)
    assert stats.prefill_seconds == pytest.approx(result.records[0].times.total)
    assert stats.decode_seconds == pytest.approx(sum(r.times.total for r in steps))
    assert json.loads(json.dumps(stats.to_dict()))["output_tokens"] == len(result.tokens)


@pytest.mark.parametrize("regime", list(Regime))
def test_records_of_every_combination(regime: Regime) -> None:
    """U78, U79, U80: identities hold for every legal combination, with and without an early end."""
    temperature = 0.0 if regime is Regime.GREEDY else 1.0
    for combination in combinations(regime):
        engine = combination.engine()
        for prompt, ignore in zip(PROMPTS, (True, False, False), strict=True):
            base = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
            params = base.model_copy(update={"ignore_eos": ignore, "stop": ("bcb", "k")})
            check_records(engine.generate(prompt, params))
        short = SamplingParams(max_tokens=9, temperature=temperature)
        for _, result in engine.run([(i, p, short) for i, p in enumerate(PROMPTS)], batch=3):
            check_records(result)


def test_nothing_drafted_is_not_full_acceptance() -> None:
    """U78: a confidence stop of 1 drafts nothing: the rate is 0, not 100%, and the drafted count says why."""
    engine = build_engine("small_model", "chain:5,stop=1.0")
    stats = engine.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True)).stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.draft_acceptance_rate) == (0, 0, 0.0)
    assert stats.mean_acceptance_length == 1.0
    assert stats.num_steps == 19


def test_eos_inside_an_accepted_prefix_counts_what_was_kept() -> None:
    """U79: [d1, d2, EOS, d4, d5] contributes 3."""
    target = ScriptModel([1, 2, 3, 0, 4, 5, 6, 7], 1, 12)
    result = build_engine("replay:1.0", "chain:5", target=target).generate([2], SamplingParams(max_tokens=30))
    step = result.records[1]
    assert (step.drafted, step.accepted, step.emitted, step.trimmed) == (5, 5, (2, 3, 0), 3)
    assert result.stats.mean_acceptance_length == 3.0
    assert result.stats.num_accepted_tokens == 3
    assert result.stats.num_accepted_tokens_per_pos == (1, 1, 1)
    assert result.stats.acceptance_per_pos == tuple(1 / result.stats.num_drafts for _ in range(3))
    assert result.stats.conditional_acceptance_per_pos == (1 / result.stats.num_drafts, 1.0, 1.0)


def test_fold_by_hand() -> None:
    """Seconds per phase, prefill apart, steps without a draft left out of the acceptance figures."""
    records = [
        StepRecord("prefill", 0, 0, 0, (5,), times=StepTimes(target=1.0, other=0.5)),
        StepRecord("decode", 1, 4, 2, (6, 7, 8), times=StepTimes(0.1, 0.2, 0.3, 0.4)),
        StepRecord("decode", 4, 0, 0, (9,), times=StepTimes(0.1, 0.2, 0.3, 0.4)),
        StepRecord("decode", 5, 4, 1, (6, 7), times=StepTimes(0.1, 0.2, 0.3, 0.4)),
    ]
    stats = fold(records, 10)
    assert (stats.prompt_tokens, stats.output_tokens, stats.num_steps, stats.num_drafts) == (10, 7, 3, 2)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos) == (8, 3, (2, 1))
    assert stats.conditional_acceptance_per_pos == (2 / stats.num_drafts, 0.5)
    assert stats.mean_acceptance_length == 2.5
    assert stats.draft_acceptance_rate == 3 / 8
    assert stats.prefill_seconds == 1.5
    assert stats.decode_seconds == pytest.approx(3.0)
    assert stats.tokens_per_second == pytest.approx(2.0)


def test_sequences_of_a_batch_share_the_step_s_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of the clock is one second after the last one: a step of two has 4 laps and each gets half."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    engine = build_engine("small_model", "chain:3")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    results = dict(engine.run([(i, p, params) for i, p in enumerate(PROMPTS[:2])], batch=2))
    first = results[0].records[1]
    assert first.times == StepTimes(0.5, 0.5, 0.5, 0.5)
    assert results[0].records[0].times == StepTimes(0.0, 1.0, 1.0, 1.0)
