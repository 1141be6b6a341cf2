"""Log-probabilities, penalties and text: what a user sees beside the tokens is plain decoding's too."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.tiny_engines import (
    Combination,
    ScriptModel,
    build_engine,
    combinations,
    letters_tokenizer,
    loaded,
    random_prompts,
)
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.text_stream import TextStream
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.text.stop import StopStrings
from outrider.types import FinishReason, Regime
from text.tiny_tokenizers import byte_level

PROMPTS = random_prompts(3, 12, seed=51)
DRAFTERS = ["ngram", "small_model", "layer_skip", "replay:0.8"]


@pytest.mark.parametrize("combination", combinations(Regime.GREEDY), ids=str)
def test_logprobs_are_the_target_s_own(combination: Combination) -> None:
    """U53: raw log-probabilities of every token and its best alternatives, to the last bit those of plain decoding."""
    params = SamplingParams(max_tokens=14, logprobs=3, repetition_penalty=1.2, ignore_eos=True)
    fast = combination.engine().generate(PROMPTS[0], params)
    model = ToyModel(vocab_size=12, order=2, seed=3)
    assert fast.logprobs is not None
    assert [entry.token for entry in fast.logprobs] == list(fast.tokens)
    for index, entry in enumerate(fast.logprobs):
        row = torch.log_softmax(model.logits_after([*PROMPTS[0], *fast.tokens[:index]]), -1)
        assert entry.logprob == float(row[entry.token])
        values, best = torch.topk(row, 3)
        assert entry.top == tuple(zip(best.tolist(), values.tolist(), strict=True))


def test_logprobs_end_where_the_tokens_end() -> None:
    """Entries of trimmed guesses are not reported; none at all unless asked for; 0 alternatives are allowed."""
    target = ScriptModel([1, 2, 3, 0, 4, 5], 1, 12)
    engine = build_engine("replay:1.0", "chain:5", target=target)
    result = engine.generate([2], SamplingParams(max_tokens=20, logprobs=0))
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == [1, 2, 3, 0]
    assert all(entry.top == () and entry.logprob < 0 for entry in result.logprobs)
    assert engine.generate([2], SamplingParams(max_tokens=20)).logprobs is None


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 1.5},
        {"logit_bias": {5: 50.0}},
        {"temperature": 0.7, "min_p": 0.3, "seed": 1},
    ],
    ids=str,
)
def test_every_parameter_has_its_effect_with_a_drafter(drafter: str, change: dict[str, object]) -> None:
    """U48, U50, U52: at all 30 positions, not only at the bonus token: the text changes, as plain decoding's does."""
    engine, plain = build_engine(drafter, "widths:2,2,1"), build_engine()
    bare = SamplingParams(max_tokens=30, ignore_eos=True)
    params = SamplingParams.parse(**(bare.model_dump() | change))
    changed = False
    for prompt in PROMPTS:
        result = engine.generate(prompt, params)
        if params.regime is Regime.GREEDY:
            assert result.tokens == plain.generate(prompt, params).tokens
        changed = changed or result.tokens != engine.generate(prompt, bare).tokens
    assert changed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_applies_the_parameters_too(temperature: float) -> None:
    """U12: q is made by the same function of the same history: a draft model that is the target is always right."""
    target = ToyModel(vocab_size=12)
    params = SamplingParams(
        max_tokens=33, temperature=temperature, seed=0, frequency_penalty=1.5, repetition_penalty=1.4, ignore_eos=True
    )
    engine = build_engine("small_model", "chain:4", target=target, draft=ToyModel(vocab_size=12))
    stats = engine.generate(PROMPTS[0], params).stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


def test_a_strong_bias_decides_every_token() -> None:
    """U50: +50 on one token, with guesses in every step."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, logit_bias={5: 50.0}, seed=0)
        for drafter in DRAFTERS:
            assert set(build_engine(drafter, "widths:2,2").generate(PROMPTS[0], params).tokens) == {5}


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_padding_rows_are_never_emitted(drafter: str, temperature: float) -> None:
    """U69: heads of 12 rows for a tokenizer of 10, the padding rows the best ones of all; and a draft head of 13."""

    class Padded(ToyModel):
        def _logits(self, view: object, layers: int) -> torch.Tensor:
            logits = super()._logits(view, layers).clone()  # type: ignore[arg-type]
            logits[10:] = 40.0
            return logits

    tokenizer = letters_tokenizer(10)
    target, draft = Padded(vocab_size=12, order=2), Padded(vocab_size=13, order=2)
    engine = build_engine(drafter, "widths:2,2", target=target, draft=draft, tokenizer=tokenizer)
    params = SamplingParams(max_tokens=30, temperature=temperature, ignore_eos=True, seed=2)
    result = engine.generate([1, 2], params)
    assert len(result.tokens) == 30
    assert max(result.tokens) < 10
    for record in result.records:
        assert max(record.tokens) < 10
    if temperature == 0.0:
        assert result.tokens == engine.plain().generate([1, 2], params).tokens


# -- text ----------------------------------------------------------------------------------------------------

TEXT = "hello 😀 wörld 你好 STOP hello 😀😀 hello 12"


def bytewise_engine(k: int, text: str = TEXT) -> tuple[Engine, list[int], int]:
    """A target that says ``text`` in a byte-level tokenizer (an emoji is four tokens), drafted perfectly."""
    tokenizer = byte_level()
    script = tokenizer.encode(text)
    prompt = tokenizer.encode("say")
    model = ScriptModel([*script, *tokenizer.eos_ids], len(prompt), tokenizer.vocab_size)
    config = EngineConfig(drafter="replay:1.0", shape=f"chain:{k}", adaptive=False)
    return Engine(config, loaded(model, tokenizer)), prompt, len(script)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_streamed_text_is_the_text(k: int) -> None:
    """Characters of several tokens inside and across accepted blocks: never half of one, nothing lost at the end."""
    engine, prompt, length = bytewise_engine(k)
    params = SamplingParams(max_tokens=100)
    events = list(engine.stream(prompt, params))
    streamed = "".join(event.text for event in events)
    assert streamed == TEXT == engine.generate(prompt, params).text
    assert all("\ufffd" not in event.text for event in events)
    assert sum(len(event.tokens) for event in events) == length + 1
    # Cut anywhere, also within a character: the text of the whole characters, never half of one.
    for limit in range(length):
        cut = SamplingParams(max_tokens=limit)
        result = engine.generate(prompt, cut)
        assert "".join(event.text for event in engine.stream(prompt, cut)) == result.text
        assert result.text == engine.tokenizer.decode(result.tokens).rstrip("\ufffd")


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("stop", ["STOP", "😀😀", " 12", "o 😀", "你", "2"])
def test_nothing_of_a_stop_string_is_shown(k: int, stop: str) -> None:
    """U32: at no moment does the shown text hold more than the final text."""
    engine, prompt, _ = bytewise_engine(k)
    expected = TEXT[: TEXT.index(stop)]
    shown = ""
    for event in engine.stream(prompt, SamplingParams(max_tokens=100, stop=(stop, "zzz"))):
        shown += event.text
        assert expected.startswith(shown)
    assert shown == expected
    assert event.result is not None
    assert (event.result.text, event.result.finish_reason) == (expected, FinishReason.STOP_STRING)


def test_an_almost_stop_string_is_shown_after_all() -> None:
    """Held back while it may be the stop string, given out when it is not, and at the end."""
    engine, prompt, _ = bytewise_engine(2)
    events = list(engine.stream(prompt, SamplingParams(max_tokens=100, stop=("hellp", "STOQ", "123"))))
    assert "".join(event.text for event in events) == TEXT


def test_batches_give_the_same_text() -> None:
    engine, prompt, length = bytewise_engine(4)
    params = [SamplingParams(max_tokens=n, stop=stop) for n, stop in itertools.product((5, length), ((), ("STOP",)))]
    results = dict(engine.run([(i, prompt, p) for i, p in enumerate(params)], batch=3))
    for index, p in enumerate(params):
        alone = engine.generate(prompt, p)
        assert (results[index].text, results[index].finish_reason) == (alone.text, alone.finish_reason)


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP_STRING])
def test_text_stream_trims_only_what_ended_the_text(finish: FinishReason) -> None:
    """A stop string that did not count (``min_tokens``) stays in the text."""
    tokenizer = letters_tokenizer(12)
    stops = StopStrings(tokenizer, ["bc"])
    stops.push([1, 2, 3])
    stream = TextStream(tokenizer, stops)
    assert stream.push([1, 2, 3], finish) == ("abc" if finish is FinishReason.LENGTH else "a")


def test_special_tokens_have_no_text() -> None:
    engine, prompt, _ = bytewise_engine(3, "a<|im_start|>b")
    assert engine.generate(prompt, SamplingParams(max_tokens=9)).text == "ab"
    marked = SamplingParams(max_tokens=9, stop=("<|im_start|>",))
    assert engine.generate(prompt, marked).finish_reason is FinishReason.STOP_STRING
