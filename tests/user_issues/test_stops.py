"""EOS, stop strings, stop ids, lengths: where a block of accepted guesses must be cut."""

from __future__ import annotations

import pytest

from engine.tiny_engines import ScriptModel, build_engine, letters_tokenizer
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.types import FinishReason
from user_issues.toy_decoding import Watched, plain_text

ALPHABET = list(range(1, 17))
"""Ids of a, b, c, ...; id 0 is the end token."""


@pytest.mark.parametrize("k", range(1, 9))
def test_stops_at_eos_in_a_block_u30(k: int) -> None:
    """EOS was accepted in the middle of a block and the rest of the block was appended and streamed.

    With any token of plain decoding's text declared as EOS, the text ends with it, in the caches too.
    """
    target = ToyModel(vocab_size=30)
    whole = plain_text(target, [3, 4], 20)
    first_uses = [i for i, token in enumerate(whole) if token not in whole[:i] and token != 0]
    for at in first_uses[:10]:
        tokenizer = Tokenizer(letters_tokenizer(30).backend, eos_ids=[whole[at]])
        engine = build_engine("replay:1.0", f"chain:{k}", target=target, tokenizer=tokenizer)
        session = engine.new_session()
        result = engine.generate([3, 4], SamplingParams(max_tokens=60), session)
        if 0 not in whole[:at]:
            assert result.tokens == whole[: at + 1]
            assert isinstance(session.cache, ToyCache)
            assert session.cache.tokens == (3, 4, *whole[:at])
            assert result.finish_reason is FinishReason.STOP_TOKEN


def test_stops_streaming_when_eos_is_not_last_u33() -> None:
    """The text went on past EOS when EOS was not the last guess of its block.

    The stream ends with the event that holds EOS, at whatever place of the block it stands, and shows nothing of it.
    """
    places = set()
    for at in range(1, 9):
        script = [*ALPHABET[:at], 0, *ALPHABET]
        engine = build_engine("replay:1.0", "chain:7", target=ScriptModel(script, 1, 20))
        events = list(engine.stream([5], SamplingParams(max_tokens=40)))
        assert [event.result is not None for event in events] == [False] * (len(events) - 1) + [True]
        assert [token for event in events for token in event.tokens] == [*ALPHABET[:at], 0]
        assert "".join(event.text for event in events) == "abcdefgh"[:at]
        last = events[-1].record
        assert last is not None
        places.add((len(last.emitted), last.drafted))
    assert {(place, 7) for place in range(1, 8)} <= places


def test_stops_at_any_of_several_ids_u34() -> None:
    """Guesses behind a stop token stayed in the output.

    The earliest token of ``stop_token_ids`` is the last of the output; its own text is not shown.
    """
    prompt = ALPHABET * 2
    for k in (2, 5, 9):
        for stops in ((7, 19), (11, 4), (3, 16, 2), (16, 15)):
            engine = build_engine("ngram", f"chain:{k}", target=ScriptModel(ALPHABET, len(prompt), 20))
            result = engine.generate(prompt, SamplingParams(max_tokens=40, stop_token_ids=stops))
            assert result.tokens == tuple(range(1, min(stops) + 1))
            assert result.text == "abcdefghijklmnop"[: min(stops) - 1]
            assert result.stats.output_tokens == min(stops)


def test_stops_at_a_string_and_goes_on_as_plain_u32() -> None:
    """After a stop string inside a block, cache, counts and random state stood behind the kept text.

    The token that completes the string is kept, the string is not shown, and the next sampled turn on the session is
    plain decoding's under the same seed (sample matching draws as plain decoding does).
    """
    target = ToyModel(vocab_size=12, order=2, seed=3)
    draft = ToyModel(vocab_size=12, order=2, seed=3, noise=0.1)
    fast = build_engine("small_model", "chain:6", None, "sample_match", target=target, draft=draft)
    plain = build_engine(target=target)
    cut_inside = 0
    for seed in range(12):
        params = SamplingParams(max_tokens=24, temperature=0.6, seed=seed, ignore_eos=True)
        stop = plain.generate([3, 4], params).text[5:7]
        sessions = fast.new_session(), plain.new_session()
        stopping = params.model_copy(update={"stop": (stop,)})
        first, slow = (
            engine.generate([3, 4], stopping, session) for engine, session in zip((fast, plain), sessions, strict=True)
        )
        assert (first.tokens, first.text) == (slow.tokens, slow.text)
        assert stop not in first.text
        assert first.finish_reason is FinishReason.STOP_STRING
        cut_inside += first.records[-1].trimmed > 0 and first.records[-1].accepted > 1
        follow = [3, 4, *first.tokens, 7]
        assert fast.generate(follow, params, sessions[0]).tokens == plain.generate(follow, params, sessions[1]).tokens
    assert cut_inside > 2


def test_stops_not_before_min_tokens_u36() -> None:
    """``min_tokens`` held for the bonus token only; EOS came early at a guessed position.

    The target wants EOS from its third token on; with min_tokens=5 each position is masked by its own index.
    """
    script = [1, 2, *[0] * 20]
    params = SamplingParams(max_tokens=12, min_tokens=5)
    texts = set()
    for drafter, k in (("none", 1), ("replay:1.0", 1), ("replay:1.0", 4), ("small_model", 4), ("small_model", 7)):
        models = {"target": ScriptModel(script, 1, 12), "draft": ScriptModel(script, 1, 12)}
        engine = build_engine(drafter, f"chain:{k}", **models)  # type: ignore[arg-type]
        result = engine.generate([4], params)
        texts.add(result.tokens)
        assert drafter == "none" or result.stats.num_accepted_tokens > 1
    (tokens,) = texts
    assert tokens[:2] == (1, 2)
    assert 0 not in tokens[:5]
    assert tokens[5:] == (0,)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_stops_drafting_near_the_end_u38(k: int) -> None:
    """The draft model ran for all its k guesses although only a few more tokens were wanted.

    For every limit from 0 to k + 2 the output has that many tokens, and no pass is spent on a guess that cannot stay.
    """
    for limit in range(k + 3):
        target, draft = ToyModel(vocab_size=12), Watched(vocab_size=12)
        result = build_engine("small_model", f"chain:{k}", target=target, draft=draft).generate(
            [3, 4, 5], SamplingParams(max_tokens=limit, ignore_eos=True)
        )
        assert result.tokens == plain_text(target, [3, 4, 5], limit)
        drafted = [record.drafted for record in result.records[1:]]
        assert drafted == [min(k, limit - record.position - 1) for record in result.records[1:]]
        assert len(draft.calls) == sum(drafted)  # one pass a guess: the first reads the text, the last guess needs none
