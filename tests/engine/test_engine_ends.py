"""Invariant 5: EOS, stop strings, max_tokens, min_tokens, context limit: the earliest wins and nothing follows it."""

from __future__ import annotations

import itertools

import pytest

from engine.tiny_engines import ScriptModel, build_engine, letters_tokenizer
from outrider.engine.engine import Engine
from outrider.engine.result import Result
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason

SIZE = 20
PROMPT = [3, 4]
LETTERS = [1 + i % 15 for i in range(60)]
"""What the scripted model says: a, b, c, ... (id 1 is 'a'; id 0 is the end token)."""


def engine(script: list[int], drafter: str = "replay:1.0", k: int = 8) -> Engine:
    """A perfect drafter on a target that says ``script``."""
    return build_engine(drafter, f"chain:{k}", target=ScriptModel(script, len(PROMPT), SIZE))


def run_streaming(engine: Engine, params: SamplingParams) -> Result:
    """Generate by streaming; nothing but the result's tokens and text is ever shown, counted or kept."""
    session = engine.new_session()
    tokens: list[int] = []
    text = ""
    for event in engine.stream(PROMPT, params, session):
        tokens += event.tokens
        text += event.text
        result = event.result
    assert result is not None
    assert (tuple(tokens), text) == (result.tokens, result.text)
    assert result.stats.output_tokens == len(tokens)
    assert sum(len(record.emitted) for record in result.records) == len(tokens)
    cache = session.cache
    assert isinstance(cache, ToyCache)
    assert cache.scratch == 0
    if tokens:
        assert list(cache.tokens) == [*PROMPT, *tokens[:-1]]
    assert result.tokens == engine.generate(PROMPT, params).tokens
    return result


@pytest.mark.parametrize("k", range(1, 9))
def test_eos_at_each_offset_of_an_accepted_block(k: int) -> None:
    """U30, U33, U79: EOS accepted in mid-block ends the sequence there; nothing after it is shown or counted."""
    for offset in range(k + 2):
        at = 1 + offset  # the prefill says index 0, the first block begins at 1
        script = [*LETTERS[:at], 0, *LETTERS]
        result = run_streaming(engine(script, k=k), SamplingParams(max_tokens=40))
        assert result.tokens == (*LETTERS[:at], 0)
        assert result.finish_reason is FinishReason.STOP_TOKEN
        assert result.text == letters_tokenizer(SIZE).decode(LETTERS[:at])
        last = result.records[-1]
        # A guess after the end token was verified, perhaps accepted; it is trimmed.
        assert last.trimmed == last.accepted + 1 - len(last.emitted)
        assert result.stats.num_accepted_tokens <= len(result.tokens)


def test_eos_as_the_first_token() -> None:
    result = run_streaming(engine([0, *LETTERS]), SamplingParams(max_tokens=5))
    assert result.tokens == (0,)
    assert result.text == ""


@pytest.mark.parametrize("k", [1, 3, 8])
def test_stop_token_ids(k: int) -> None:
    """U34: an ordinary token as stop id: it is the last token, and its text is not shown."""
    for at in range(1, k + 3):
        stop = LETTERS[at]
        result = run_streaming(engine(LETTERS, k=k), SamplingParams(max_tokens=40, stop_token_ids=(stop, 19)))
        assert result.tokens == tuple(LETTERS[: at + 1])
        assert result.finish_reason is FinishReason.STOP_TOKEN
        assert result.text == letters_tokenizer(SIZE).decode(LETTERS[:at])


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("stop", ["d", "de", "cdef", "abc", "defghij"])
def test_stop_strings_over_tokens_and_steps(stop: str, k: int) -> None:
    """U32: the completing token is kept, the string is not shown, whatever the block borders."""
    result = run_streaming(engine(LETTERS, k=k), SamplingParams(max_tokens=40, stop=(stop,)))
    text = "abcdefghijklmno"
    assert result.finish_reason is FinishReason.STOP_STRING
    assert result.text == text[: text.index(stop)]
    assert len(result.tokens) == text.index(stop) + len(stop)


def test_the_random_stream_stands_at_the_kept_point() -> None:
    """U32: a sampled request with a stop string inside a block, then the same seed on the same session: as plain."""
    target = ToyModel(vocab_size=12, order=2, seed=3)
    fast, plain = build_engine("small_model", "chain:6", target=target), build_engine("none", target=target)
    for seed in range(20):
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        whole = fast.generate(PROMPT, params)
        stop = whole.text[4:6]
        session = fast.new_session()
        cut = fast.generate(PROMPT, params.model_copy(update={"stop": (stop,)}), session)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        follow = [*PROMPT, *cut.tokens, 5]
        assert fast.generate(follow, params, session).tokens == fast.generate(follow, params).tokens
        greedy = SamplingParams(max_tokens=8, seed=seed)
        assert fast.generate(follow, greedy, session).tokens == plain.generate(follow, greedy).tokens


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("minimum", [0, 1, 2, 3, 5, 9])
def test_min_tokens_at_draft_positions(minimum: int, k: int) -> None:
    """U36: the target wants EOS at its third token; the mask goes by each position's own index."""
    script = [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    params = SamplingParams(max_tokens=20, min_tokens=minimum)
    fast = run_streaming(engine(script, k=k), params)
    slow = run_streaming(engine(script, "none"), params)
    assert fast.tokens == slow.tokens
    assert len(fast.tokens) == max(3, minimum + 1)
    assert 0 not in fast.tokens[:minimum]


@pytest.mark.parametrize("k", [1, 8])
def test_a_stop_string_before_min_tokens_does_not_count(k: int) -> None:
    """It ends nothing and hides nothing, then or later; the next one after the minimum does."""
    script = [1, 2, 3, 4, 5, 1, 2, 6, 7]
    params = SamplingParams(max_tokens=9, min_tokens=4, stop=("ab",))
    result = run_streaming(engine(script, k=k), params)
    assert result.finish_reason is FinishReason.STOP_STRING
    assert result.text == "abcde"
    assert result.tokens == (1, 2, 3, 4, 5, 1, 2)
    short = run_streaming(engine(script, k=k), params.model_copy(update={"max_tokens": 2}))
    assert (short.finish_reason, short.text) == (FinishReason.LENGTH, "ab")


@pytest.mark.parametrize("k", [1, 4, 8])
def test_max_tokens(k: int) -> None:
    """U38: 0 ... k + 2 tokens: never more, no guess that could not be kept, and no crash at 0."""
    for limit in range(k + 3):
        result = run_streaming(engine(LETTERS, k=k), SamplingParams(max_tokens=limit))
        assert result.tokens == tuple(LETTERS[:limit])
        assert result.finish_reason is FinishReason.LENGTH
        for record in result.records:
            assert record.drafted <= max(0, limit - record.position - 1)


@pytest.mark.parametrize("drafter", ["replay:1.0", "small_model", "layer_skip", "ngram", "none"])
@pytest.mark.parametrize("shape", ["chain:8", "widths:2,2,2,2"])
def test_context_limit(drafter: str, shape: str) -> None:
    """U39, U41, U42: prompts up to the last place of a context of 16; the toy model raises beyond it."""
    target = ToyModel(vocab_size=12, order=2, seed=3, context_length=16)
    fast, plain = build_engine(drafter, shape, target=target), build_engine(target=target)
    for length in (1, 8, 12, 13, 14, 15):
        prompt = [1 + i % 11 for i in range(length)]
        params = SamplingParams(ignore_eos=True)
        result = fast.generate(prompt, params)
        assert result.finish_reason is FinishReason.CONTEXT
        assert len(result.tokens) == 16 - length
        assert result.tokens == plain.generate(prompt, params).tokens


def test_a_short_draft_context_stops_drafting_not_the_answer() -> None:
    """U44, U47: the draft model holds 12 positions, the target 4096."""
    target = ToyModel(vocab_size=12, order=2, seed=3)
    draft = ToyModel(vocab_size=12, order=2, seed=3, noise=0.2, context_length=12)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    result = build_engine("small_model", "chain:5", target=target, draft=draft).generate(PROMPT, params)
    assert result.stats.num_draft_tokens > 0
    assert result.tokens == build_engine(target=target).generate(PROMPT, params).tokens


def test_a_draft_model_with_fewer_tokens_than_the_target() -> None:
    """U69, U71: tokens added to the target alone have no row in the draft model: guessing goes on around them."""
    target, draft = ToyModel(vocab_size=12, order=2, seed=3), ToyModel(vocab_size=9, order=2, seed=3)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    fast = build_engine("small_model", "widths:2,2", target=target, draft=draft)
    for prompt in ([1, 2, 11, 10, 3], [5], [11]):
        result = fast.generate(prompt, params)
        assert result.stats.num_draft_tokens > 0
        assert result.tokens == build_engine(target=target).generate(prompt, params).tokens


def test_the_earliest_event_wins() -> None:
    """EOS at 6, a stop id at 4, a stop string complete at 5, the limit at 7, in every subset and block length."""
    script = [1, 2, 3, 4, 5, 6, 0, 7, 8]
    events = {"eos": 7, "id": 4, "string": 5, "limit": 8}
    reasons = {
        "eos": FinishReason.STOP_TOKEN,
        "id": FinishReason.STOP_TOKEN,
        "string": FinishReason.STOP_STRING,
        "limit": FinishReason.LENGTH,
    }
    for k in (1, 3, 8):
        fast = engine(script, k=k)
        for count in (1, 2, 3):
            for chosen in itertools.combinations(["eos", "id", "string"], count):
                params = SamplingParams(
                    max_tokens=events["limit"],
                    ignore_eos="eos" not in chosen,
                    stop_token_ids=(4,) if "id" in chosen else (),
                    stop=("de",) if "string" in chosen else (),
                )
                first = min(chosen, key=events.__getitem__)
                result = run_streaming(fast, params)
                assert (len(result.tokens), result.finish_reason) == (events[first], reasons[first])


def test_one_token_can_be_both_stop_token_and_end_of_a_stop_string() -> None:
    result = run_streaming(engine(LETTERS), SamplingParams(max_tokens=9, stop_token_ids=(3,), stop=("bc",)))
    assert result.finish_reason is FinishReason.STOP_TOKEN
    assert result.tokens == (1, 2, 3)
    assert result.text == "ab"


def test_ignore_eos() -> None:
    """The end token is a token like any other (and leaves no text)."""
    script = [1, 0, 2, 0, 3]
    result = run_streaming(engine(script), SamplingParams(max_tokens=5, ignore_eos=True))
    assert result.tokens == (1, 0, 2, 0, 3)
    assert result.text == "abc"
    assert result.finish_reason is FinishReason.LENGTH
