"""The search for the sublayers that a self-speculative draft leaves out, on toy models and invented costs."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.tiny_engines import build_engine, letters_tokenizer, random_prompts
from models.tiny_checkpoints import write_pretrained
from outrider.cli.app import run
from outrider.cli.tune_layers import warn
from outrider.drafters.base import DraftParts
from outrider.drafters.layer_skip import LayerSkip, LayerSkipOptions
from outrider.drafters.layer_subsets import LayerSubset, find_subset, parse_skip
from outrider.engine.layer_costs import LONGEST_CHAIN, SublayerCosts, expected_tokens, measure_costs
from outrider.engine.layer_search import Candidate, LayerSearch, MatchMeter
from outrider.engine.layer_tuning import LayerTuning, tune_layers
from outrider.errors import InvalidOptionError
from outrider.models.base import LanguageModel, Segment, Sublayers
from outrider.models.decoder import Decoder
from outrider.models.load import open_checkpoint, resolve
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.chain import Chain, ChainOptions

TOY = ToyModel(vocab_size=12, order=2, seed=3)
FLAT = SublayerCosts(attention=1.0, mlp=2.0, rest=1.0, passes=(13.0,) * (LONGEST_CHAIN + 1))
LOSSES = (0.30, 0.02, 0.05, 0.10, 0.01, 0.20, 0.04, 0.40)


def separable(skip: Sublayers) -> float:
    """A matchness that falls by a fixed share for every sublayer left out."""
    return math.prod(1.0 - LOSSES[sublayer] for sublayer in skip)


def speed(skip: Sublayers) -> float:
    return FLAT.best_chain(separable(skip), FLAT.draft(skip, 4))[0]


def texts(model: LanguageModel, lengths: tuple[int, ...] = (9, 2, 6)) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the model says after them, by its plain path."""
    found = []
    for prompt, length in zip(random_prompts(len(lengths), 12, seed=1), lengths, strict=True):
        output: list[int] = []
        for _ in range(length):
            row = model.forward([Segment(model.new_cache(), [*prompt, *output])])[0].logits[-1]
            output.append(int(row.argmax()))
        found.append((prompt, output))
    return found


def tiny_decoder(folder: Path) -> Decoder:
    write_pretrained(folder)
    plan = WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))
    return Decoder(open_checkpoint(resolve(str(folder))), plan)


# -- matchness ---------------------------------------------------------------------------------------------------


def drafted_share(model: LanguageModel, found: list[tuple[list[int], list[int]]], skip: Sublayers) -> float:
    """As a chain of one guess does it, token by token: the text's own entries, then one row without ``skip``."""
    right = []
    for prompt, output in found:
        text = [*prompt, *output]
        for end in range(len(prompt), len(text) - 1):
            cache = model.new_cache()
            model.forward([Segment(cache, text[:end])])
            cache.commit(range(end))
            guess = model.forward([Segment(cache, [text[end]])], skip=skip)[0].logits[0].argmax()
            right.append(int(guess) == text[end + 1])
    return sum(right) / len(right)


@pytest.mark.parametrize("kind", ["toy", "decoder"])
def test_matchness_is_the_acceptance_of_first_guesses(kind: str, tmp_path: Path) -> None:
    model = TOY if kind == "toy" else tiny_decoder(tmp_path / "tiny")
    found = texts(model, (14, 2, 1, 11))
    meter = MatchMeter(model, found)
    assert meter.tokens == 13 + 1 + 0 + 10
    subsets = [frozenset(s) for s in ({0}, {3}, {0, 1}, {1, 2}, {0, 1, 3})]
    if kind == "toy":  # its skipped sublayers are few of eight
        subsets += [frozenset(range(6)), frozenset(range(1, 8))]
    measured = [meter.measure(skip) for skip in subsets]
    assert measured == [pytest.approx(drafted_share(model, found, skip)) for skip in subsets]
    assert [meter.measure(skip) for skip in reversed(subsets)] == measured[::-1]
    assert meter.measure(frozenset()) == 1.0
    assert min(measured) < 1.0


def test_texts_that_say_nothing_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="too short to search layers on"):
        MatchMeter(TOY, [([1, 2], [3]), ([1], [])])


# -- costs -------------------------------------------------------------------------------------------------------


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_the_best_chain_is_leviathans() -> None:
    """Theorem 3.8: (1 - a^(g+1)) / ((1 - a) (g c + 1)), when a pass over more rows costs the same."""
    for rate, draft in [(0.9, 1.3), (0.6, 6.0), (0.3, 12.0), (0.95, 0.1)]:
        c = draft / 13.0
        speeds = [(1 - rate ** (g + 1)) / ((1 - rate) * (g * c + 1)) for g in range(1, LONGEST_CHAIN + 1)]
        best, length = FLAT.best_chain(rate, draft)
        assert best == pytest.approx(max(speeds))
        assert length == speeds.index(max(speeds)) + 1


def test_a_draft_costs_what_it_keeps() -> None:
    assert FLAT.draft(frozenset(), 4) == 13.0
    assert FLAT.draft(frozenset({0, 2, 3}), 4) == 13.0 - 1.0 - 1.0 - 2.0
    assert FLAT.draft(frozenset(range(1, 8)), 4) == 2.0


class Slow(ToyModel):
    """Pretends to take 1 ms for an attention, 3 ms for an MLP, 2 ms for the rest and 1 ms for each further row."""

    clock = 0.0

    def forward(self, segments, hidden=(), skip=frozenset()):  # type: ignore[no-untyped-def]
        kept = [s for s in range(2 * self.num_layers) if s not in skip]
        rows = sum(len(segment.tokens) for segment in segments)
        Slow.clock += 0.002 + 0.001 * (rows - 1) + sum(0.003 if s % 2 else 0.001 for s in kept)
        return super().forward(segments, hidden, skip)


def test_measured_costs_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.layer_costs.time.perf_counter", lambda: Slow.clock)
    costs = measure_costs(Slow(vocab_size=12, order=2))
    assert (costs.attention, costs.mlp, costs.rest) == pytest.approx((0.001, 0.003, 0.002))
    assert costs.passes == pytest.approx([0.018 + 0.001 * rows for rows in range(LONGEST_CHAIN + 1)])


def test_costs_of_a_model_with_a_short_context() -> None:
    assert len(measure_costs(ToyModel(vocab_size=4, context_length=LONGEST_CHAIN + 1)).passes) == LONGEST_CHAIN + 1


# -- the search --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_the_best_subset_of_a_size_is_found(size: int) -> None:
    result = LayerSearch(separable, FLAT, 4, size, moves=60).run()
    best = max(speed(frozenset(skip)) for skip in itertools.combinations(range(8), size))
    assert len(result.best.skip) == size
    assert result.best.speedup == pytest.approx(best)
    assert result.best.matchness == separable(result.best.skip)
    assert result.stopped is None


def test_without_a_size_the_fastest_of_all_is_found() -> None:
    result = LayerSearch(separable, FLAT, 4, moves=100).run()
    every = [frozenset(s) for n in range(1, 8) for s in itertools.combinations(range(8), n)]
    assert result.best.speedup == pytest.approx(max(map(speed, every)))
    assert result.evaluations < len(every)
    assert result.best in result.by_size.values()


def test_moves_repair_what_elimination_cannot_undo() -> None:
    """The best single sublayer is not in the best pair."""
    known = {(1,): 0.99, (3,): 0.95, (5,): 0.9, (1, 3): 0.85, (3, 5): 0.93}

    def measure(skip: Sublayers) -> float:
        return known.get(tuple(sorted(skip)), 0.5)

    assert LayerSearch(measure, FLAT, 4, 2, moves=0).run().best.skip == {1, 3}
    assert LayerSearch(measure, FLAT, 4, 2, moves=100).run().best.skip == {3, 5}


def test_the_same_seed_tries_the_same_subsets() -> None:
    def tried(seed: int) -> list[Sublayers]:
        seen: list[Sublayers] = []

        def measure(skip: Sublayers) -> float:
            seen.append(skip)
            return separable(skip)

        LayerSearch(measure, FLAT, 4, moves=12, seed=seed).run()
        return seen

    assert tried(5) == tried(5)
    assert tried(5) != tried(6)
    assert len(set(tried(5))) == len(tried(5))


def stopping_after(count: int, action: Callable[[], None]) -> Callable[[Sublayers], float]:
    calls = itertools.count(1)

    def measure(skip: Sublayers) -> float:
        if next(calls) > count:
            action()
        return separable(skip)

    return measure


def test_ctrl_c_keeps_the_best_so_far() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    result = LayerSearch(stopping_after(11, interrupt), FLAT, 4, 3).run()
    assert (result.stopped, result.evaluations) == ("interrupted", 11)
    assert len(result.best.skip) == 2  # the size asked for was not reached
    with pytest.raises(KeyboardInterrupt):
        LayerSearch(stopping_after(0, interrupt), FLAT, 4, 3).run()


def test_the_deadline_ends_the_search() -> None:
    result = LayerSearch(separable, FLAT, 4, deadline=time.monotonic() - 1).run()
    assert (result.stopped, result.evaluations) == ("time is up", 1)


def test_progress_never_exceeds_its_total() -> None:
    seen: list[tuple[int, int, Candidate]] = []
    result = LayerSearch(separable, FLAT, 4, progress=lambda *report: seen.append(report)).run()
    assert [done for done, _, _ in seen] == list(range(1, result.evaluations + 1))
    assert all(done <= total for done, total, _ in seen)
    assert seen[-1][2] == result.best


@pytest.mark.parametrize("size", [0, 8, 9])
def test_a_size_that_leaves_nothing_is_refused(size: int) -> None:
    with pytest.raises(InvalidOptionError, match="of 8 sublayers cannot be left out: give 1 to 7"):
        LayerSearch(separable, FLAT, 4, size)


# -- from a model to a stored subset -----------------------------------------------------------------------------


def test_held_out_matchness_is_what_drafting_then_accepts() -> None:
    target = ToyModel(vocab_size=12, seed=3)  # looks at the whole prefix: its text does not loop
    prompts = random_prompts(12, 12, seed=2)
    tuning = LayerTuning(0.5, max_tokens=40, moves=5)
    tuned = tune_layers(build_engine("none", target=target), prompts, tuning, "outrider tune layers")
    subset = tuned.subset
    assert len(parse_skip(subset.skip, 4)) == 4
    assert subset.evaluations == tuned.search.evaluations
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    searched = build_engine(f"layer_skip:skip={subset.skip}", "chain:1", target=target).generate([1, 2], params)
    assert searched.stats.draft_acceptance_rate == pytest.approx(subset.held_out, abs=0.2)


@pytest.mark.parametrize(("share", "size"), [(None, None), (0.01, 1), (0.5, 4), (0.99, 7)])
def test_share_of_the_sublayers(share: float | None, size: int | None) -> None:
    assert LayerTuning(share).size(4) == size


def test_what_cannot_be_tuned_is_refused() -> None:
    engine = build_engine("none", target=ToyModel(vocab_size=12))
    with pytest.raises(InvalidOptionError, match="one prompt is too few"):
        tune_layers(engine, [[1, 2]], LayerTuning(), "")
    with pytest.raises(InvalidOptionError, match="only 0 of the model's answers"):
        tune_layers(engine, [[1, 2], [3]], LayerTuning(max_tokens=1), "")
    engine.model.num_layers = 1
    with pytest.raises(InvalidOptionError, match="'tiny' has a single block"):
        tune_layers(engine, [[1, 2], [3]], LayerTuning(), "")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_command_on_the_toy_model(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "layers", "--model", "toy", "--max-new-tokens", "12", "--moves", "3", "--skip-share", "0.25"]
    assert run(command) == 0
    assert "not stored: this model has no weights to know it by" in capsys.readouterr().out
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(parse_skip(found["skip"], 4)) == 2
    assert found["file"] is None
    assert found["stopped"] is None
    assert set(found["by_size"]) == {"1", "2"}
    assert "--skip-share 0.25" in found["command"]
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--max-seconds", "0"], "--max-seconds 0 is not allowed"),
        (["--skip-share", "1"], "--skip-share 1 is not allowed"),
        (["--moves", "-1"], "--moves -1 is not allowed"),
        (["--max-new-tokens", "1"], "--max-new-tokens 1 is not allowed"),
    ],
)
def test_options_out_of_range(option: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "layers", "--model", "toy", *option]) == 2
    assert said in capsys.readouterr().err


def test_the_command_stores_for_the_drafter(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine around a tiny decoder: what ``tune layers`` leaves is what ``layer_skip`` then uses."""
    model = tiny_decoder(tmp_path / "tiny")
    tokenizer = letters_tokenizer(model.vocab_size, with_end=False)
    engine = build_engine("none", target=model, tokenizer=tokenizer)  # type: ignore[arg-type]
    monkeypatch.setattr("outrider.cli.engine_factory.load_engine", lambda options: engine)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "aaa"}\n{"prompt": "bcd"}\n{"turns": ["ab", "c"]}\n')
    assert run(["tune", "layers", "--file", str(prompts), "-n", "9", "--moves", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Path(found["file"]).parent == own_cache / "layer_subsets"
    stored = find_subset(model)
    assert stored is not None
    assert stored.skip == found["skip"]
    assert f"--file {prompts}" in stored.command
    drafter = LayerSkip(LayerSkipOptions(), Chain(ChainOptions()), DraftParts(model))
    assert drafter.skip == parse_skip(found["skip"], 2)


def test_a_loss_and_what_is_replaced_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    def subset(skip: str, speedup: float) -> LayerSubset:
        return LayerSubset(
            model="m", skip=skip, matchness=0.5, held_out=0.5, speedup=speedup, chain=2, tokens=9, seed=0,
            evaluations=3, command="outrider tune layers",
        )  # fmt: skip

    warn(subset("3a", 1.2), None, Path("there.json"))
    assert capsys.readouterr().err == ""
    warn(subset("3a", 0.9), subset("4m.5", 0.7), Path("there.json"))
    err = capsys.readouterr().err
    assert "slower than plain decoding" in err
    assert "takes the place of 4m.5" in err
    assert "delete there.json" in err
