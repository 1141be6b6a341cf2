"""Invariant 4: after every step the target's and the drafter's caches equal a fresh prefill of the committed text.

The toy cache holds the tokens that its entries were computed from and refuses an entry of another prefix, so equality
of ``tokens`` with the committed text is equality with a fresh prefill.
"""

from __future__ import annotations

import pytest

from engine.tiny_engines import Combination, build_engine, combinations, random_prompts
from outrider.drafters.small_model import SmallModelSession
from outrider.engine.engine import Engine, Session
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, Regime

PROMPTS = random_prompts(6, 12, seed=5)
EVERY = list(dict.fromkeys([*combinations(Regime.GREEDY), *combinations(Regime.SAMPLED)]))


def check_caches(session: Session, text: list[int], covered: int | None = None) -> None:
    """Nothing speculative is left, and every cache covers a prefix of ``text`` (``covered`` tokens in the target)."""
    cache = session.cache
    assert isinstance(cache, ToyCache)
    assert cache.scratch == 0
    assert list(cache.tokens) == text[: cache.length][len(text[: cache.length]) - len(cache.tokens) :]
    assert session.tokens == text[: cache.length]
    if covered is not None:
        assert cache.length == covered
    for draft in session.drafts.values():
        if isinstance(draft, SmallModelSession):
            assert isinstance(draft.cache, ToyCache)
            assert draft.cache.scratch == 0
            assert draft.cache.length < len(text) or draft.cache.length == 0
            assert list(draft.cache.tokens) == text[: draft.cache.length]


def check_every_step(engine: Engine, prompt: list[int], params: SamplingParams, session: Session) -> list[int]:
    """Stream a request, looking into the caches after each step."""
    text = list(prompt)
    stream = engine.stream(prompt, params, session)
    sequence = stream.gi_frame.f_locals["active"].sequence  # type: ignore[attr-defined]
    for event in stream:
        text += event.tokens
        assert sequence.cache.scratch == 0
        assert list(sequence.cache.tokens) == text[:-1]
        draft = sequence.session
        if event.record is not None and isinstance(draft, SmallModelSession):
            assert draft.tokens == text
            assert isinstance(draft.cache, ToyCache)
            assert draft.cache.scratch == 0
            assert list(draft.cache.tokens) == text[: draft.cache.length]
            if event.record.drafted:
                # What was accepted is not read again: at most the bonus token and the leaf above it are new.
                assert draft.cache.length >= len(text) - 2
    check_caches(session, text, covered=len(text) - 1)
    return text


@pytest.mark.parametrize("combination", EVERY, ids=str)
def test_caches_after_every_step_and_turn(combination: Combination) -> None:
    """U08, U65, U68: five turns on one session: fresh, continued, diverging, shorter, another one altogether."""
    engine = combination.engine()
    session = engine.new_session()
    regime = 0.0 if combination in combinations(Regime.GREEDY) else 0.9
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=regime, seed=4)
    text = check_every_step(engine, PROMPTS[0], params, session)
    turns = [[*text, 3, 4], [*text[:4], 7, 7, 7], text[:3], PROMPTS[2]]
    for prompt in turns:
        again = check_every_step(engine, prompt, params, session)
        assert again[len(prompt) :] == list(engine.generate(prompt, params).tokens)


def test_the_common_prefix_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat's second turn evaluates only what is new, in the target and in the draft model."""
    rows: dict[int, int] = {}
    original = ToyModel.forward

    def counting(self, segments, hidden=(), skip=frozenset()):  # type: ignore[no-untyped-def]
        rows[id(self)] = rows.get(id(self), 0) + sum(len(segment.tokens) for segment in segments)
        return original(self, segments, hidden, skip)

    monkeypatch.setattr(ToyModel, "forward", counting)
    engine = build_engine("small_model", "chain:2")
    session = engine.new_session()
    prompt = random_prompts(1, 12, seed=8)[0] * 40
    text = [*prompt, *engine.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), session).tokens, 5]
    rows.clear()
    engine.generate(text, SamplingParams(max_tokens=3, ignore_eos=True), session)
    assert len(rows) == 2
    assert max(rows.values()) < 12 < len(prompt)


@pytest.mark.parametrize("drafter", ["ngram", "small_model", "layer_skip", "replay:0.9"])
def test_caches_after_an_early_end(drafter: str) -> None:
    """U30, U32: EOS, stop string, length and context cut accepted guesses; the cache ends with the kept text."""
    target = ToyModel(vocab_size=12, order=2, seed=3, context_length=40)
    engine = build_engine(drafter, "widths:2,2,1", target=target)
    plain = build_engine(target=target)
    ends = set()
    for prompt in random_prompts(12, 12, seed=11):
        tokens = plain.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True)).tokens
        for params in (
            SamplingParams(max_tokens=12),
            SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[4],)),
            SamplingParams(max_tokens=12, ignore_eos=True, stop=(plain.tokenizer.decode(tokens[3:5]) or "zz",)),
            SamplingParams(max_tokens=7, ignore_eos=True),
            SamplingParams(max_tokens=500, ignore_eos=True),
        ):
            session = engine.new_session()
            result = engine.generate(prompt, params, session)
            ends.add(result.finish_reason)
            check_caches(session, [*prompt, *result.tokens], covered=len(prompt) + len(result.tokens) - 1)
            follow = [*prompt, *result.tokens, 2]
            if len(follow) < 35:
                greedy = SamplingParams(max_tokens=5)
                assert engine.generate(follow, greedy, session).tokens == plain.generate(follow, greedy).tokens
    assert ends == set(FinishReason) - {FinishReason.CANCELLED}


def test_caches_with_the_controller_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """U65: steps in which the controller allows no guess leave a gap in the draft cache that is filled later."""
    budgets = iter([0, 0, 0, 4, 0, 3, 3, 0, 0, 0, 0, 5] * 20)
    monkeypatch.setattr("outrider.schedules.controller.Controller.choose", lambda self: next(budgets))
    engine = build_engine("small_model", "chain:5", adaptive=True)
    result = check_every_step(engine, PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), engine.new_session())
    expected = build_engine().generate(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True)).tokens
    assert tuple(result[len(PROMPTS[0]) :]) == expected


@pytest.mark.parametrize("drafter", ["small_model", "layer_skip", "ngram"])
def test_a_window_that_cannot_go_back_starts_afresh(drafter: str) -> None:
    """U67, U68: with a sliding window the diverging turn cannot reuse the cache; the text is right all the same."""
    target = ToyModel(vocab_size=12, window=6)
    draft = ToyModel(vocab_size=12, window=6, noise=0.3) if drafter == "small_model" else None
    engine, plain = build_engine(drafter, "chain:3", target=target, draft=draft), build_engine(target=target)
    session = engine.new_session()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    text = [*PROMPTS[0], *engine.generate(PROMPTS[0], params, session).tokens]
    for prompt in ([*text[:5], 9, 9], [*text, 4], text[:2]):
        assert engine.generate(prompt, params, session).tokens == plain.generate(prompt, params).tokens


def test_two_drafters_may_share_a_session() -> None:
    """The caches of one engine's drafter are not handed to another one's."""
    first = build_engine("small_model", "chain:3")
    second = first.plain()
    session = first.new_session()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    text = [*PROMPTS[0], *first.generate(PROMPTS[0], params, session).tokens]
    result = second.generate([*text, 1], params, session)
    assert result.stats.num_draft_tokens == 0
    assert first.generate([*text, 1], params, session).tokens == result.tokens


@pytest.mark.parametrize("drafter", ["none", "small_model", "layer_skip", "ngram"])
def test_two_requests_at_a_time_on_one_session(drafter: str) -> None:
    """The second one finds the caches taken and makes its own; neither writes to the other's."""
    engine = build_engine(drafter, "chain:3", target=ToyModel(vocab_size=12))
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    session = engine.new_session()
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
    expected = [engine.generate(prompt, params, session).tokens for prompt in prompts]
    streams = [engine.stream(prompt, params, session) for prompt in prompts]
    outputs: list[list[int]] = [[], [], []]
    for _ in range(10):
        for stream, output in zip(streams, outputs, strict=True):
            output += [token for event in [next(stream, None)] if event is not None for token in event.tokens]
    assert [tuple(output) for output in outputs] == expected
    again = [1, 2, 3, *outputs[2], 7]
    assert engine.generate(again, params, session).tokens == engine.generate(again, params).tokens


def test_a_planted_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """U08: an engine that keeps one entry too few would fail above (the toy cache refuses, or the text differs)."""
    original = ToyCache.commit

    def faulty(self: ToyCache, slots: list[int]) -> None:
        original(self, list(slots)[: max(1, len(slots) - 1)])

    monkeypatch.setattr(ToyCache, "commit", faulty)
    engine = build_engine("replay:1.0", "chain:4")
    with pytest.raises((ValueError, AssertionError)):
        check_every_step(engine, PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True), engine.new_session())
