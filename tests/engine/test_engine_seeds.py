"""Invariant 7: the same seed gives the same output, whatever else runs, whatever the clock says."""

from __future__ import annotations

import random

import pytest

from engine.tiny_engines import Combination, build_engine, combinations, random_prompts
from outrider.engine.engine import Engine
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Regime

PROMPTS = random_prompts(5, 12, seed=31)
BASE = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, ignore_eos=True)


def seeded(seed: int) -> SamplingParams:
    return BASE.model_copy(update={"seed": seed})


def jitter(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A clock on which every lap takes between 0 and 2 seconds."""
    now, draws = [0.0], random.Random(seed)

    def clock() -> float:
        now[0] += draws.random() * 2
        return now[0]

    monkeypatch.setattr("time.perf_counter", clock)


@pytest.mark.parametrize("combination", combinations(Regime.SAMPLED), ids=str)
def test_same_seed_same_output_in_any_company(combination: Combination) -> None:
    """U20, U26: alone, twice, after other requests, in batches of 2 to 5, in any order."""
    engine = combination.engine()
    alone = {i: engine.generate(p, seeded(i)).tokens for i, p in enumerate(PROMPTS)}
    engine.generate(PROMPTS[1], BASE)  # an unseeded one between
    assert engine.generate(PROMPTS[0], seeded(0)).tokens == alone[0]
    requests = [(i, p, seeded(i)) for i, p in enumerate(PROMPTS)]
    for batch, order in ((2, requests), (5, requests), (3, requests[::-1])):
        assert {key: result.tokens for key, result in engine.run(order, batch=batch)} == alone


@pytest.mark.parametrize("drafter", ["none", "small_model", "ngram", "layer_skip"])
def test_different_seeds_differ(drafter: str) -> None:
    """U18: temperature and seed have an effect; without a seed two runs differ as well."""
    engine = build_engine(drafter, "widths:2,2")
    outputs = {engine.generate(PROMPTS[0], seeded(seed)).tokens for seed in range(20)}
    assert len(outputs) > 15
    assert len({engine.generate(PROMPTS[0], BASE).tokens for _ in range(5)}) > 1


@pytest.mark.parametrize("drafter", ["none", "small_model", "ngram", "replay:0.5"])
def test_the_seed_changes_nothing_at_temperature_zero(drafter: str) -> None:
    """U28."""
    engine = build_engine(drafter, "widths:2,2")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    outputs = {engine.generate(PROMPTS[0], params.model_copy(update={"seed": s})).tokens for s in (None, *range(10))}
    assert len(outputs) == 1


def adaptive_outputs(engine: Engine, params: list[SamplingParams], batch: int) -> dict[object, tuple[int, ...]]:
    requests = [(i, p, q) for i, (p, q) in enumerate(zip(PROMPTS, params, strict=True))]
    return {key: result.tokens for key, result in engine.run(requests, batch=batch)}


@pytest.mark.parametrize("batch", [1, 3])
def test_timing_does_not_choose_seeded_output(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """The controller reads the clock; with a seed its opinion is not asked for, at temperature 0 it has no effect."""
    fixed = build_engine("small_model", "chain:6")
    params = [seeded(i) for i in range(len(PROMPTS))]
    expected = adaptive_outputs(fixed, params, 1)
    greedy = [SamplingParams(max_tokens=30, ignore_eos=True)] * len(PROMPTS)
    expected_greedy = adaptive_outputs(fixed, greedy, 1)
    for seed in range(4):
        jitter(monkeypatch, seed)
        engine = build_engine("small_model", "chain:6", adaptive=True)
        assert adaptive_outputs(engine, params, batch) == expected
        assert adaptive_outputs(engine, greedy, batch) == expected_greedy
        # An unseeded neighbour in the batch changes nothing either.
        mixed = [BASE, *params[1:]]
        outputs = adaptive_outputs(engine, mixed, batch)
        assert {k: v for k, v in outputs.items() if k != 0} == {k: v for k, v in expected.items() if k != 0}


def test_seeded_requests_teach_the_controller_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They draft a full tree whatever the level chosen, so their seconds belong to no level."""
    seen: list[int] = []
    record = "outrider.schedules.controller.Controller.record"
    monkeypatch.setattr(record, lambda self, drafted, *rest: seen.append(drafted))
    engine = build_engine("small_model", "chain:6", adaptive=True)
    engine.generate(PROMPTS[0], seeded(1))
    list(engine.run([(0, PROMPTS[0], seeded(1)), (1, PROMPTS[1], BASE)], batch=2))
    alone = len(seen)
    engine.generate(PROMPTS[0], BASE)
    assert alone < len(seen)
    assert alone <= BASE.max_tokens  # at most the steps of the batch that the unseeded one finished alone


def test_the_controller_counts_tokens_per_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences that keep one token each are one token per step, as one sequence is: rates stay comparable."""
    seen: list[float] = []
    record = "outrider.schedules.controller.Controller.record"
    monkeypatch.setattr(record, lambda self, drafted, emitted, *rest: seen.append(emitted))
    engine = build_engine("replay:1.0", "chain:3", target=ToyModel(vocab_size=12), adaptive=True)
    monkeypatch.setattr("outrider.schedules.controller.Controller.choose", lambda self: 3)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    list(engine.run([(i, p, params) for i, p in enumerate(PROMPTS)], batch=5))
    assert seen == [4.0, 4.0]


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "layer_skip", "ensemble", "hybrid", "lookahead"])
def test_sample_match_gives_plain_samplings_text_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Invariant 8 for seeded requests: the controller stays on, and the text is that of no speculation at all."""
    params = [seeded(i) for i in range(len(PROMPTS))]
    expected = adaptive_outputs(build_engine("none"), params, 1)
    for seed in range(3):
        jitter(monkeypatch, seed)
        engine = build_engine(drafter, "chain:4", ProposalKind.DETERMINISTIC, adaptive=True)
        assert engine.describe()["verifier"] == "greedy (greedy), sample_match (sampled)"
        assert adaptive_outputs(engine, params, 1 + seed) == expected
        assert engine._lanes[Regime.SAMPLED].schedule.controller.step > 0
