"""``small_model:window=N``: what the draft cache covers, what moving it costs, and that the output does not notice.

U44: a draft context smaller than the target's must neither end speculation nor make it dear. U47: a window that was
asked for is the one that is used, or is refused.
"""

from __future__ import annotations

import itertools

import pytest

from engine.tiny_engines import build_engine, letters_tokenizer, random_prompts
from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.drafters.base import DraftParts
from outrider.drafters.small_model import DraftWindow, SmallModel, SmallModelOptions, SmallModelSession
from outrider.engine.engine import Engine, Session
from outrider.errors import InvalidOptionError
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.types import ProposalKind

TARGET = ToyModel(vocab_size=12, order=2, seed=3)
PROMPT = [1, 2, 3, 4, 5]


def draft_model(context_length: int = 4096) -> ToyModel:
    return ToyModel(vocab_size=12, order=2, seed=3, noise=0.2, context_length=context_length)


def built(window: int, context_length: int = 4096) -> SmallModel:
    parts = DraftParts(TARGET, draft_model(context_length))
    return SmallModel(SmallModelOptions(window=window), Chain(ChainOptions(length=5)), parts)


def watch(engine: Engine, prompt: list[int], params: SamplingParams, session: Session) -> SmallModelSession:
    """Run a request; after every step the draft cache must equal a fresh prefill of the text that it covers.

    The toy cache refuses entries computed under another prefix, so equal tokens are equal entries.
    """
    text = list(prompt)
    stream = engine.stream(prompt, params, session)
    draft = stream.gi_frame.f_locals["active"].sequence.session  # type: ignore[attr-defined]
    for event in stream:
        text += event.tokens
        cache = draft.cache
        assert isinstance(cache, ToyCache)
        assert cache.scratch == 0
        assert list(cache.tokens) == draft.covered == text[draft.start : draft.start + cache.length]
        assert cache.length <= draft.window.size + 5  # the guesses just accepted
        if event.record is not None and event.record.drafted:
            assert draft.start + cache.length >= len(text) - 2  # accepted guesses are not read again
    assert text[len(prompt) :] == list(engine.plain().generate(prompt, params).tokens)
    assert isinstance(draft, SmallModelSession)
    return draft


@pytest.mark.parametrize("size", [4, 5, 7, 32, 33])
def test_a_window_shows_more_than_its_half_and_moves_by_halves(size: int) -> None:
    window = DraftWindow(size)
    starts = [window.start(length) for length in range(1, 400)]
    assert starts[:size] == [0] * size
    for length, start in enumerate(starts, 1):
        assert length - start <= size
        assert start == 0 or length - start > size - size // 2
    assert {after - before for before, after in itertools.pairwise(starts)} == {0, size // 2}
    assert all(DraftWindow().start(length) == 0 for length in (1, 10, 10_000))


@pytest.mark.parametrize("shape", ["chain:5", "widths:2,2,1"])
def test_window_32_over_500_tokens(shape: str) -> None:
    """U44: a move of 16 tokens re-evaluates 16 and the guesses of a step at most; greedy output is plain's."""
    engine = build_engine("small_model:window=32", shape, target=TARGET, draft=draft_model())
    draft = watch(engine, PROMPT, SamplingParams(max_tokens=500, ignore_eos=True), engine.new_session())
    assert draft.start >= 400
    moves = draft.start // 16
    assert moves >= 28
    assert 8 * moves <= draft.reread <= (16 + 5) * moves
    assert draft.reread <= 1.3 * 500


def test_the_window_is_seen_in_the_guesses() -> None:
    """A draft model that looks at the whole prefix guesses otherwise once the text's beginning is out of sight."""
    draft = ToyModel(vocab_size=12, seed=5)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    trees = {}
    for spec in ("small_model", "small_model:window=8"):
        engine = build_engine(spec, "chain:3", target=TARGET, draft=draft)
        result = engine.generate(PROMPT, params)
        trees[spec] = {record.position: record.tokens for record in result.records if record.drafted}
    first, second = trees.values()
    shared = sorted(first.keys() & second.keys())
    assert [
        position for position in shared if position + len(PROMPT) <= 8 and first[position] != second[position]
    ] == []
    assert [position for position in shared if position + len(PROMPT) > 8 and first[position] != second[position]]


def test_turns_of_a_conversation() -> None:
    """U65: continued, diverging before and inside the window, shorter, and another prompt altogether."""
    engine = build_engine("small_model:window=8", "chain:3", target=TARGET, draft=draft_model())
    session, params = engine.new_session(), SamplingParams(max_tokens=9, ignore_eos=True)
    first = random_prompts(1, 12, seed=6, longest=20)[0]
    text = [*first, *engine.plain().generate(first, params).tokens]
    for prompt in (first, [*text, 3, 4], [*text[:-2], 7, 7], [9, *text[1:]], text[:3], [5] * 30):
        watch(engine, prompt, params, session)


@pytest.mark.parametrize("spec", ["small_model", "small_model:window=8"])
def test_a_short_draft_context_goes_on_past_its_end(spec: str) -> None:
    """U44, U47: the draft model holds 12 positions, the target 4096; guessing does not stop there."""
    engine = build_engine(spec, "chain:5", target=TARGET, draft=draft_model(12))
    session = engine.new_session()
    draft = watch(engine, PROMPT, SamplingParams(max_tokens=60, ignore_eos=True), session)
    assert draft.window.size == (9 if spec == "small_model" else 8)
    result = engine.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
    late = [record for record in result.records if record.position > 12 and record.position < 58]
    assert late
    assert all(record.drafted > 0 for record in late)


def test_a_draft_context_as_long_as_the_targets_takes_no_window() -> None:
    assert built(0).window == DraftWindow(0)
    assert built(0, context_length=4000).window == DraftWindow(4000 - 64)
    assert built(0, context_length=3).window == DraftWindow(0)
    assert built(200).window == DraftWindow(200)


def test_windows_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="window=3 is too short to draft from; give 4 or more"):
        built(3)
    with pytest.raises(InvalidOptionError, match="context of 128 tokens; give at most 96"):
        built(97, context_length=128)
    assert built(96, context_length=128).window == DraftWindow(96)


@pytest.mark.parametrize("proposal", [ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT])
def test_the_sampled_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, proposal: ProposalKind) -> None:
    """Every random outcome of a request whose window moves; the draft model sees the whole window."""
    size, length, prompt = 2, 5, [0, 1, 1]
    target = ToyModel(size, order=1, sharpness=0.9, seed=10)
    draft = ToyModel(size, sharpness=0.9, seed=30)
    shape = "chain:2" if proposal is ProposalKind.IID else "widths:2,1"
    tokenizer = letters_tokenizer(size, with_end=False)
    engine = build_engine(
        "small_model:window=4", shape, proposal, target=target, draft=draft, tokenizer=tokenizer, max_nodes=2
    )
    params = SamplingParams(temperature=1.0, max_tokens=length)
    law: dict[tuple[int, ...], float] = {}
    starts: set[int] = set()

    def run(stream: EnumeratingStream) -> tuple[int, ...]:
        monkeypatch.setattr("outrider.engine.engine.SeededStream", lambda seed: stream)
        session = engine.new_session()
        result = engine.generate(prompt, params, session)
        starts.update(draft.start for draft in session.drafts.values() if isinstance(draft, SmallModelSession))
        return result.tokens

    for tokens, probability in outcomes(run):
        law[tokens] = law.get(tokens, 0.0) + probability
    assert max(starts) > 0
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    pipeline = LogitsPipeline(params, size, prompt=prompt)
    for tokens, mass in law.items():
        expected = 1.0
        for index, token in enumerate(tokens):
            expected *= float(pipeline.probabilities(target.logits_after([*prompt, *tokens[:index]]), ())[token])
        assert mass == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("spec", ["cascade:ngram", "cascade:ngram,window=8", "cross_tokenizer:window=8"])
def test_other_drafters_with_a_second_model_go_on_past_its_context(spec: str) -> None:
    """U44: the window is small_model's; a draft context of 12 positions must not end their guessing either."""
    engine = build_engine(spec, "chain:5", target=TARGET, draft=draft_model(12))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    result = engine.generate(PROMPT, params)
    assert result.tokens == engine.plain().generate(PROMPT, params).tokens
    late = [record for record in result.records if 12 < record.position < 58]
    assert late
    assert all(record.drafted > 0 for record in late)
