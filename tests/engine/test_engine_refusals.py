"""Refusals: the right exception, before anything runs, in one sentence that names the value and the fix."""

from __future__ import annotations

import math

import numpy as np
import pytest

import outrider
from engine.tiny_engines import build_engine, letters_tokenizer, loaded
from outrider.config import EngineConfig
from outrider.engine.build import plan_parts
from outrider.engine.engine import Engine
from outrider.errors import (
    ContextLengthError,
    IllegalCombinationError,
    InvalidOptionError,
    UnknownNameError,
    UsageError,
)
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Regime


def refuse(expected: type[UsageError], *words: str, regime: Regime | None = None, **options: object) -> None:
    """``load`` refuses ``options`` with a sentence that has ``words`` in it."""
    with pytest.raises(expected) as caught:
        outrider.load("toy", regime=regime, **options)
    check_message(caught.value, *words)


def check_message(error: BaseException, *words: str) -> None:
    message = str(error)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_greedy_verifier_above_temperature_zero() -> None:
    """Refused when asked for that regime at load, and at the request otherwise; temperature 0 goes on working."""
    words = ("greedy", "deterministic", "temperature above 0", "multi_step")
    refuse(IllegalCombinationError, *words, regime=Regime.SAMPLED, verifier="greedy")
    engine = outrider.load("toy", verifier="greedy")
    with pytest.raises(IllegalCombinationError) as caught:
        engine.generate("hello", SamplingParams(temperature=0.5, max_tokens=3))
    check_message(caught.value, *words)
    assert len(engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True)).tokens) == 3


def test_options_for_a_part_that_has_none() -> None:
    refuse(InvalidOptionError, "verifier 'block' takes no options", "'3'", "'block' alone", verifier="block:3")
    refuse(InvalidOptionError, "drafter 'none' takes no options", "'none' alone", drafter="none:3")


@pytest.mark.parametrize("proposal", ["iid", "without_replacement"])
def test_sampled_proposals_with_ngram(proposal: str) -> None:
    refuse(IllegalCombinationError, "ngram", proposal, "deterministic", drafter="ngram", proposal=proposal)


def test_a_shape_that_cannot_make_the_proposal() -> None:
    refuse(IllegalCombinationError, "per_source", drafter="small_model", draft_model="toy-draft", proposal="per_source")


def test_a_shape_that_cannot_make_the_proposal_is_refused_before_weights_load() -> None:
    config = EngineConfig(drafter="layer_skip", shape="pacer", proposal=ProposalKind.IID)
    with pytest.raises(IllegalCombinationError) as caught:
        plan_parts(config, Regime.SAMPLED)
    check_message(caught.value, "pacer", "iid", "--proposal deterministic")


def test_parts_that_only_the_built_drafter_refuses_for_one_temperature_serve_the_other() -> None:
    """Text re-encoding has nothing to draw from: no sampling with drawn guesses, but temperature 0 works."""
    engine = outrider.load("toy", drafter="cross_tokenizer:text", draft_model="toy-draft")
    assert len(engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True)).tokens) == 3
    with pytest.raises(IllegalCombinationError) as caught:
        engine.generate("hello", SamplingParams(temperature=0.5, max_tokens=3))
    check_message(caught.value, "mode=text", "--proposal deterministic")


def test_missing_and_superfluous_draft_model() -> None:
    refuse(InvalidOptionError, "small_model", "--draft-model", drafter="small_model")
    refuse(InvalidOptionError, "ngram", "--draft-model", "small_model", drafter="ngram", draft_model="toy-draft")


def test_another_tokenizer() -> None:
    """U71, U75: told where they differ; a shorter vocabulary with the same spellings is fine."""
    config = EngineConfig(drafter="small_model", draft_model="other")
    target, draft = ToyModel(vocab_size=12), ToyModel(vocab_size=12)
    with pytest.raises(IllegalCombinationError) as caught:
        Engine(config, loaded(target), [loaded(draft, letters_tokenizer(12, with_end=False), "other")])
    check_message(caught.value, "'other'", "'tiny'", "tokenizer", "0", "same family")
    Engine(config, loaded(target), [loaded(draft, letters_tokenizer(10), "shorter")])


@pytest.mark.parametrize("layers", [4, 5, 100])
def test_layers_out_of_range(layers: int) -> None:
    refuse(InvalidOptionError, f"layers={layers}", "4", drafter=f"layer_skip:{layers}")


def test_layer_skip_on_a_model_without_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyModel, "supports_skip", False)
    refuse(InvalidOptionError, "layer_skip", "--drafter", drafter="layer_skip")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": "ngramm"}, ("drafter", "'ngramm'", "did you mean 'ngram'?")),
        ({"shape": "chian:4"}, ("shape", "'chian'", "did you mean 'chain'?")),
        ({"verifier": "greddy"}, ("verifier", "did you mean 'greedy'?", "multi_step")),
        ({"drafter": "xyz"}, ("drafter", "known: ")),
    ],
)
def test_unknown_names(options: dict[str, object], words: tuple[str, ...]) -> None:
    refuse(UnknownNameError, *words, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "chain:0"}, ("length", "'0'")),
        ({"shape": "chain:4,stp=0.1"}, ("stp", "stop")),
        ({"shape": "widths:2,x"}, ("widths", "1,1,3,1")),
        ({"drafter": "ngram:0"}, ("max_match",)),
        ({"drafter": "none:3"}, ("none",)),
        ({"max_nodes": -1}, ("max_nodes", "-1")),
        ({"proposal": "best"}, ("proposal", "best", "deterministic")),
        ({"temperature": 1}, ("temperature",)),
        ({"threads": 0}, ("threads", "0")),
    ],
)
def test_options(options: dict[str, object], words: tuple[str, ...]) -> None:
    refuse(InvalidOptionError, *words, **options)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1}, ("temperature", "-1")),
        ({"temperature": math.nan}, ("temperature", "nan")),
        ({"top_p": 0}, ("top_p", "0")),
        ({"top_p": 1.5}, ("top_p", "1.5")),
        ({"top_k": -2}, ("top_k", "-2")),
        ({"min_p": 2}, ("min_p", "2")),
        ({"seed": -1}, ("seed", "-1")),
        ({"max_tokens": -1}, ("max_tokens", "-1")),
        ({"logit_bias": {3: math.nan}}, ("logit_bias.3", "nan")),
        ({"logit_bias": {3: -math.inf}}, ("logit_bias.3", "inf")),
        ({"stop": [""]}, ("stop", "empty")),
        ({"repetition_penalty": 0}, ("repetition_penalty", "0")),
        ({"logprobs": 101}, ("logprobs", "101")),
        ({"grammar": "x"}, ("grammar", "not supported")),
        ({"temprature": 1}, ("temprature",)),
    ],
)
def test_sampling_parameters(values: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        SamplingParams.parse(**values)
    check_message(caught.value, *words)


@pytest.mark.parametrize(
    ("prompt", "params", "expected", "words"),
    [
        ([], {}, InvalidOptionError, ("prompt is empty",)),
        ("", {}, InvalidOptionError, ("prompt is empty",)),
        ([12], {}, InvalidOptionError, ("prompt", "12", "0 to 11")),
        ([1, -1], {}, InvalidOptionError, ("prompt", "-1")),
        ([1, "a"], {}, InvalidOptionError, ("prompt", "token ids")),
        ([1, 2.5], {}, InvalidOptionError, ("prompt", "token ids")),
        ([{"role": "user", "content": "a"}], {}, InvalidOptionError, ("chat template",)),
        ([{"role": "user", "content": "a"}, 3], {}, InvalidOptionError, ("messages",)),
        ([1], {"logit_bias": {12: 1.0}}, InvalidOptionError, ("logit_bias", "12", "0 to 11")),
        ([1], {"logit_bias": {-1: 1.0}}, InvalidOptionError, ("logit_bias", "-1")),
        ([1], {"stop_token_ids": (-1,), "min_tokens": 2}, InvalidOptionError, ("stop_token_ids", "-1")),
        ([1], {"logprobs": 13}, InvalidOptionError, ("logprobs", "13", "12")),
        ([1] * 30, {}, ContextLengthError, ("30", "context", "shorten it to 29")),
        ([1] * 31, {}, ContextLengthError, ("31", "30")),
    ],
)
def test_requests(
    prompt: object, params: dict[str, object], expected: type[UsageError], words: tuple[str, ...]
) -> None:
    """U57 in spirit: refused when the stream is asked for, not at its first event; the engine goes on working."""
    engine = build_engine("ngram", target=ToyModel(vocab_size=12, context_length=30))
    with pytest.raises(expected) as caught:
        engine.stream(prompt, SamplingParams.parse(**params))  # type: ignore[arg-type]
    check_message(caught.value, *words)
    assert len(engine.generate([1], SamplingParams(max_tokens=2, ignore_eos=True)).tokens) == 2


def test_numpy_token_ids_are_token_ids() -> None:
    """They were silently left out once, and the prompt with them."""
    engine = build_engine("none")
    prompt = list(np.asarray([3, 4, 5], dtype=np.int64))
    assert engine.encode(prompt) == [3, 4, 5]
    assert engine.generate(prompt, SamplingParams(max_tokens=4)).prompt_tokens == 3


def test_batch_size() -> None:
    with pytest.raises(InvalidOptionError, match="batch=0"):
        next(build_engine("none").run([], batch=0))


def test_with_parts() -> None:
    engine = build_engine("none")
    assert engine.with_parts(drafter="ngram", shape="chain:3").describe()["shape"] == "chain:3"
    with pytest.raises(InvalidOptionError, match="max_nodes=-1"):
        engine.with_parts(max_nodes=-1)
    with pytest.raises(InvalidOptionError, match="dtype"):
        engine.with_parts(dtype="float32")
    with pytest.raises(UnknownNameError, match="drafter 'x'"):
        engine.with_parts(drafter="x")


def test_other_parts_on_the_same_models() -> None:
    """From an engine with a draft model to a drafter without one: the draft model is left out, not in the way."""
    engine = build_engine("small_model", "chain:3")
    other = engine.with_parts(drafter="ngram", proposal=ProposalKind.DETERMINISTIC)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert other.generate([1, 2], params).tokens == engine.generate([1, 2], params).tokens
    assert other.describe()["drafter"] == "ngram"
    back = other.with_parts(drafter="small_model", proposal=None)
    assert back.generate([1, 2], params).stats.num_accepted_tokens > 0
    assert back.describe()["drafter"] == "small_model (tiny-draft)"


def test_min_tokens_with_every_token_a_stop_token_is_refused() -> None:
    engine = outrider.load("toy", drafter="none")
    params = SamplingParams(min_tokens=2, stop_token_ids=tuple(range(engine.tokenizer.vocab_size)))
    with pytest.raises(InvalidOptionError, match="min_tokens=2"):
        engine.generate("hello", params)


@pytest.mark.parametrize("option", [{"dtype": "float32"}, {"weights": "int4"}, {"trust_remote_code": True}])
def test_options_that_a_model_cannot_honour_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        outrider.load("toy" if "trust_remote_code" not in option else "smollm2-135m", drafter="none", **option)
