"""A draft model with another tokenizer: the text is the target's, the law is the target's, the cache is the text's.

The target speaks single letters; the draft speaks letters and pairs of letters under other ids, and lacks one letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor

from engine.tiny_engines import END, build_engine, engine_law, letters_tokenizer, loaded, random_prompts
from outrider.config import EngineConfig
from outrider.drafters.cross_tokenizer import CrossTokenizerSession, Mode
from outrider.engine.engine import Engine
from outrider.engine.loading import LoadedModel
from outrider.errors import IllegalCombinationError
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.text.running_encoding import RunningEncoding
from outrider.text.tokenizer import Tokenizer
from outrider.types import ProposalKind
from text.tiny_tokenizers import byte_level, sentencepiece

DETERMINISTIC, IID, WITHOUT = list(ProposalKind)[:3]
LETTERS = "abcdefghijk"


def spelling_tokenizer(texts: Sequence[str], with_end: bool = True) -> Tokenizer:
    """Letters, and pairs of them that are merged where they occur; the end token comes last."""
    names = [*texts, END] if with_end else list(texts)
    merges = [(text[0], text[1]) for text in texts if len(text) == 2]
    backend = Backend(models.BPE({text: index for index, text in enumerate(names)}, merges))
    backend.decoder = decoders.Fuse()
    if with_end:
        backend.add_special_tokens([END])
    return Tokenizer(backend, eos_ids=[len(texts)] if with_end else [])


TARGET = spelling_tokenizer(LETTERS)
PAIRS = spelling_tokenizer(["bc", *reversed(LETTERS[:-1]), "ab", "ea", "cd", "ia"])


class Speller(ToyModel):
    """Says what ``ToyModel(order=2, seed=3)`` over the letters would, in tokens of its own, with some noise."""

    def __init__(self, own: Tokenizer, letters: Tokenizer, vocab_size: int, noise: float = 0.0, **options: int) -> None:
        super().__init__(vocab_size, noise=noise, **options)
        self.letters = ToyModel(letters.vocab_size, order=2, seed=3)
        self._spelled = [letters.encode(own.token_text(token)) for token in range(own.vocab_size)]
        self._own = own.vocab_size
        self._scores: dict[tuple[int, ...], Tensor] = {}

    def _logits(self, view: object, skip: frozenset[int] = frozenset()) -> Tensor:
        before = [letter for token in view for letter in self._spelled[min(int(token), self._own - 1)]]  # type: ignore[attr-defined]
        logits = torch.full((self.vocab_size,), 9.0, dtype=torch.float64)  # padding rows look attractive
        last = tuple(before[-2:])
        if last not in self._scores:
            self._scores[last] = torch.tensor([self._score(before, spelled) for spelled in self._spelled])
        logits[: self._own] = self._scores[last]
        other = super()._logits(np.asarray(view), skip)
        logits[: self._own] += self.noise * other[: self._own]
        return logits

    def _score(self, before: list[int], spelled: list[int]) -> float:
        text, score = list(before), 0.0
        for letter in spelled:
            score += float(torch.log_softmax(self.letters.logits_after(text), -1)[letter])
            text.append(letter)
        return score / len(spelled)


def engine(
    mode: str = "auto",
    shape: str = "chain:4",
    proposal: ProposalKind | None = None,
    *,
    forward: bool = True,
    verifier: str | None = None,
    noise: float = 0.1,
    **options: int,
) -> Engine:
    """Letters drafted by pairs (``forward``), or pairs drafted by letters."""
    own = PAIRS if forward else TARGET
    drafter = loaded(Speller(own, TARGET, own.vocab_size + 2, noise, **options), own, "tiny-draft")
    if forward:
        target = loaded(ToyModel(TARGET.vocab_size, order=2, seed=3), TARGET)
    else:
        target = loaded(Speller(PAIRS, TARGET, PAIRS.vocab_size), PAIRS)
    return make_engine(target, drafter, mode, shape, proposal, verifier)


def make_engine(
    target: LoadedModel,
    draft: LoadedModel,
    mode: str,
    shape: str,
    proposal: ProposalKind | None,
    verifier: str | None = None,
) -> Engine:
    config = EngineConfig(
        model="tiny",
        draft_model="tiny-draft",
        drafter=f"cross_tokenizer:{mode}",
        shape=shape,
        proposal=proposal,
        verifier=verifier,
        adaptive=False,
    )
    return Engine(config, target, [draft])


PROMPTS = ["abcdeab", "e", "iakkia", "bcbcbcbcabcdef"]
WAYS = [("auto", None), ("intersection", None), ("text", DETERMINISTIC)]


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("shape", ["chain:4", "widths:2,2,1"])
@pytest.mark.parametrize(("mode", "proposal"), WAYS)
def test_greedy_text_is_plain(mode: str, proposal: ProposalKind | None, shape: str, forward: bool) -> None:
    """Invariant 1, both ways round, with the parameters that look at the text."""
    fast = engine(mode, shape, proposal, forward=forward)
    plain = fast.plain()
    accepted = 0
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=6),
    ):
        for prompt in PROMPTS:
            result = fast.generate(fast.tokenizer.encode(prompt), params)
            assert result.tokens == plain.generate(fast.tokenizer.encode(prompt), params).tokens
            accepted += result.stats.num_accepted_tokens
    assert accepted > 60


@pytest.mark.parametrize("forward", [True, False])
def test_sampled_text_is_plain_under_sample_match(forward: bool) -> None:
    """Text guesses at temperature 1: the target's own draws walk down the chain, so the seed alone decides the text."""
    fast = engine("text", "chain:4", DETERMINISTIC, forward=forward, verifier="sample_match")
    plain, ids, accepted = fast.plain(), fast.tokenizer.encode(PROMPTS[0]), 0
    for seed in range(8):
        params = SamplingParams(temperature=1.0, max_tokens=30, seed=seed, ignore_eos=True)
        result = fast.generate(ids, params)
        assert result.tokens == plain.generate(ids, params).tokens
        accepted += result.stats.num_accepted_tokens
    assert accepted > 60


def test_padding_and_foreign_rows_are_never_proposed() -> None:
    """U69: the draft's padding rows have the best logits; and the letter that it lacks can't come from it."""
    lacking = TARGET.encode("k")[0]
    for mode, shape in (("auto", "chain:4"), ("intersection", "widths:3,3")):
        fast = engine(mode, shape)
        for prompt in PROMPTS:
            result = fast.generate(fast.tokenizer.encode(prompt), SamplingParams(max_tokens=30, ignore_eos=True))
            guesses = {token for record in result.records for token in record.tokens[1:]}
            assert guesses
            assert guesses <= set(range(TARGET.vocab_size)) - {lacking}


def test_the_end_is_proposed_under_the_targets_id() -> None:
    """The two end tokens pair by role; a draft that ends the text proposes the target's end, and nothing behind it."""
    found = 0
    for mode in ("auto", "intersection"):
        fast = engine(mode, noise=0.0)
        for prompt in random_prompts(12, TARGET.vocab_size - 1, seed=2):
            result = fast.generate([token % 11 for token in prompt], SamplingParams(max_tokens=60))
            for record in result.records:
                ends = [at for at, token in enumerate(record.tokens) if token == TARGET.vocab_size - 1]
                assert ends in ([], [len(record.tokens) - 1]) or mode == "intersection"
                found += len(ends)
    assert found > 2


class Reciter(ToyModel):
    """Says a text and ends, in tokens of its own, from wherever the text so far stands."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(tokenizer.vocab_size)
        self.tokenizer = tokenizer
        self.text = text.encode()
        self._next: dict[int, int] = {}
        start = 0
        for token in tokenizer.encode(text, add_special_tokens=False):
            self._next[start] = token
            start += len(tokenizer.token_bytes(token))

    def _logits(self, view: object, skip: frozenset[int] = frozenset()) -> Tensor:
        own = self.tokenizer
        said = sum(len(own.token_bytes(int(token))) for token in view if int(token) not in own.special_ids)  # type: ignore[attr-defined]
        token = self._next.get(said)
        if token is None:
            fitting = [i for i in range(own.vocab_size) if i not in own.special_ids and self._fits(i, said)]
            token = max(fitting, key=lambda i: len(own.token_bytes(i)), default=max(own.eos_ids))
        logits = torch.zeros(self.vocab_size, dtype=torch.float64)
        logits[token] = 12.0
        return logits

    def _fits(self, token: int, said: int) -> bool:
        data = self.tokenizer.token_bytes(token)
        return bool(data) and self.text[said:].startswith(data)


def reciters(target: Tokenizer, draft: Tokenizer, text: str, shape: str) -> Engine:
    speaker, drafter = Reciter(target, text), Reciter(draft, text)
    return make_engine(loaded(speaker, target), loaded(drafter, draft, "tiny-draft"), "auto", shape, None)


@pytest.mark.parametrize(("target", "draft"), [(PAIRS, TARGET), (TARGET, PAIRS)])
def test_a_guess_waits_until_its_end_shows(target: Tokenizer, draft: Tokenizer) -> None:
    """Two letters of the draft are one token of the target, or the reverse: one step gets the whole answer."""
    said = "abcdeaiafgh"
    fast = reciters(target, draft, "aj" + said, "chain:16")
    result = fast.generate(target.encode("aj"), SamplingParams(max_tokens=40))
    assert result.text == said
    first = result.records[1]
    assert list(first.tokens) == target.encode("aj" + said)[-first.drafted :] + sorted(target.eos_ids)
    assert first.accepted == first.drafted == len(result.tokens) - 1


BYTES, PIECES = byte_level(), sentencepiece(False)


@pytest.mark.parametrize(("target", "draft"), [(BYTES, PIECES), (PIECES, BYTES)])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_characters_split_over_tokens(target: Tokenizer, draft: Tokenizer, length: int) -> None:
    """An emoji is four tokens: whatever part of it is committed, the guesses are the rest of it."""
    said = "😀😀你好é x😀."
    fast = reciters(target, draft, "12" + said, f"chain:{length}")
    result = fast.generate(target.encode("12"), SamplingParams(max_tokens=80))
    assert result.text == said
    assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens
    # Almost every chain is as long as it may be: giving out part of a character does not end it.
    assert result.stats.num_steps <= -(-len(result.tokens) // (length + 1)) + 1


# -- the law above temperature 0 -----------------------------------------------------------------------------------

SIZE = 3
LAW_TARGET = spelling_tokenizer("abc", with_end=False)
LAW_DRAFT = spelling_tokenizer(["ab", "b", "d", "a"], with_end=False)  # shares a and b


def law_engine(kind: ProposalKind, shape: str, mode: str) -> Engine:
    target = ToyModel(SIZE, order=1, sharpness=0.9, seed=10)
    draft = ToyModel(4, sharpness=0.9, seed=30)
    return make_engine(
        loaded(target, LAW_TARGET), loaded(draft, LAW_DRAFT, "tiny-draft"), mode, shape, kind, "multi_step"
    )


def exact_law(params: SamplingParams, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Joint law of the output by the chain rule, from the model's obvious path."""
    model = ToyModel(SIZE, order=1, sharpness=0.9, seed=10)
    pipeline = LogitsPipeline(params, SIZE, prompt=prompt)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        law = {
            (*output, token): mass * float(p[token])
            for output, mass in law.items()
            for p in [pipeline.probabilities(model.logits_after([*prompt, *output]), output)]
            for token in range(SIZE)
            if p[token] > 0
        }
    return law


LAWS = [
    (IID, "chain:2", "auto"),
    (WITHOUT, "widths:2,1", "auto"),
    (IID, "widths:2", "intersection"),
    (DETERMINISTIC, "widths:2,1", "intersection"),
    (DETERMINISTIC, "chain:2", "text"),
]
LAW_PARAMS = {
    "bare": SamplingParams(temperature=1.0, max_tokens=4),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=4),
    "top_p": SamplingParams(temperature=1.3, top_p=0.75, max_tokens=3),
}


@pytest.mark.parametrize("params", LAW_PARAMS.values(), ids=LAW_PARAMS)
@pytest.mark.parametrize(("kind", "shape", "mode"), LAWS)
def test_exact_law(
    monkeypatch: pytest.MonkeyPatch, kind: ProposalKind, shape: str, mode: str, params: SamplingParams
) -> None:
    """Invariant 2: every random outcome of a short request, and guesses that were kept in some of them."""
    fast = law_engine(kind, shape, mode)
    law, accepted = engine_law(monkeypatch, fast, [0, 1], params)
    expected = exact_law(params, [0, 1], params.max_tokens)
    assert accepted > 0
    assert {tokens for tokens, mass in law.items() if mass > 1e-15} == expected.keys()
    assert max(abs(law[tokens] - mass) for tokens, mass in expected.items()) < 1e-12


def test_an_unnormalised_intersection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the logits of unshared tokens leak into q, under ids that cannot be drawn."""
    from outrider.sampling.transform import LogitsPipeline as Pipeline

    original = Pipeline.probabilities

    def leaking(self: Pipeline, logits: Tensor, output: Sequence[int]) -> Tensor:
        q = original(self, logits, output)
        return q * 0.7 if bool(logits.isinf().any()) else q

    monkeypatch.setattr(Pipeline, "probabilities", leaking)
    with pytest.raises(AssertionError):
        test_exact_law(monkeypatch, IID, "chain:2", "auto", LAW_PARAMS["bare"])


def test_no_shared_token_may_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shared tokens are stop ids that ``min_tokens`` forbids: guesses are useless, the law is still right."""
    params = SamplingParams(temperature=1.0, max_tokens=3, min_tokens=3, stop_token_ids=(0, 1))
    fast = law_engine(WITHOUT, "widths:2,1", "auto")
    law, _ = engine_law(monkeypatch, fast, [0, 1], params)
    assert {tokens for tokens, mass in law.items() if mass > 0} == {(2, 2, 2)}


def test_frequencies_over_seeds() -> None:
    """The first three letters of 1200 seeds against the exact joint law: pairs in the draft, no letter k."""
    runs, params = 1200, SamplingParams(temperature=0.5, top_p=0.9, max_tokens=3, ignore_eos=True)
    fast = engine("auto", "widths:2,1")
    prompt = fast.tokenizer.encode("abcd")
    model, pipeline = ToyModel(TARGET.vocab_size, order=2, seed=3), fast.pipeline(params, prompt)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        law = {
            (*output, token): mass * chance
            for output, mass in law.items()
            for token, chance in enumerate(
                pipeline.probabilities(model.logits_after([*prompt, *output]), output).tolist()
            )
            if chance > 0
        }
    requests = [(seed, prompt, params.model_copy(update={"seed": seed})) for seed in range(runs)]
    results = [result for _, result in fast.run(requests, batch=8)]
    assert sum(result.stats.num_accepted_tokens for result in results) > runs / 4
    counts = Counter(result.tokens for result in results)
    assert counts.keys() <= law.keys()
    common = [tokens for tokens in law if law[tokens] * runs >= 5]
    observed = np.array([counts[tokens] for tokens in common], dtype=float)
    expected = np.array([law[tokens] * runs for tokens in common])
    observed, expected = np.append(observed, runs - observed.sum()), np.append(expected, runs - expected.sum())
    keep = expected > 1e-9
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


# -- the draft cache -----------------------------------------------------------------------------------------------


def check_cache(session: CrossTokenizerSession, text: Sequence[int]) -> int:
    """The cache is a proper prefix of the fresh encoding of ``text``; returns how many tokens of that it lacks."""
    fresh = RunningEncoding(session.translator)
    fresh.extend(text)
    assert session.encoding.tokens == fresh.tokens
    assert isinstance(session.cache, ToyCache)
    assert session.cache.scratch == 0
    assert list(session.cache.tokens) == session.covered
    assert session.covered == fresh.tokens[: session.cache.length]
    return len(fresh.tokens) - session.cache.length


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("shape", ["chain:4", "widths:2,2,1"])
@pytest.mark.parametrize(("mode", "proposal"), WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cache_after_every_step_and_turn(
    mode: str, proposal: ProposalKind | None, shape: str, forward: bool, temperature: float
) -> None:
    """Invariant 4: after every step, with guesses accepted, merged across the border and rejected; then other turns."""
    fast = engine(mode, shape, proposal, forward=forward)
    session = fast.new_session()
    params = SamplingParams(max_tokens=14, ignore_eos=True, temperature=temperature, seed=3)
    text = fast.tokenizer.encode(PROMPTS[0])
    reused = 0
    for turn in (text, None, text[:3], fast.tokenizer.encode("ka")):
        prompt = [*text, 2, 3] if turn is None else turn
        text = list(prompt)
        stream = fast.stream(prompt, params, session)
        draft = stream.gi_frame.f_locals["active"].sequence.session  # type: ignore[attr-defined]
        for event in stream:
            text += event.tokens
            assert isinstance(draft, CrossTokenizerSession)
            lacking = check_cache(draft, text)
            if event.record is not None and event.record.accepted:
                reused += lacking <= 3  # the bonus token and what a merge took back
        assert text[len(prompt) :] == list(fast.generate(prompt, params).tokens)
    assert reused > 3


def test_a_draft_window_that_cannot_go_back() -> None:
    """U67: a merge takes an entry back that a sliding window dropped; the draft starts afresh, the text is the same."""
    fast = engine("auto", "chain:4", window=3)
    plain = fast.plain()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt in PROMPTS:
        ids = fast.tokenizer.encode(prompt)
        result = fast.generate(ids, params)
        assert result.tokens == plain.generate(ids, params).tokens
        assert result.stats.num_draft_tokens > 0


@pytest.mark.parametrize(("mode", "proposal"), WAYS)
def test_a_short_draft_context(mode: str, proposal: ProposalKind | None) -> None:
    """U38, U44: the draft's context ends before the target's; guesses go on in a window of it."""
    fast = engine(mode, "chain:4", proposal, context_length=16)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    ids = fast.tokenizer.encode(PROMPTS[0])
    result = fast.generate(ids, params)
    assert result.tokens == fast.plain().generate(ids, params).tokens
    assert result.records[2].drafted > 0
    assert all(record.drafted > 0 for record in result.records if 20 < record.position < 38)


# -- what is refused, and what is not ------------------------------------------------------------------------------


def test_text_mode_cannot_be_sampled_from() -> None:
    with pytest.raises(IllegalCombinationError, match="mode=text has no distribution"):
        engine(Mode.TEXT, "chain:2", IID)


def test_vocabularies_without_a_common_token() -> None:
    """Nothing can be drawn; text still can be read, even if nothing of it lines up."""
    target = loaded(ToyModel(3, order=1), spelling_tokenizer("abc", with_end=False))
    draft = loaded(ToyModel(3, order=1), spelling_tokenizer("xyz", with_end=False), "tiny-draft")
    fast = make_engine(target, draft, "auto", "chain:2", None)
    with pytest.raises(IllegalCombinationError, match="no token in common"):
        fast.generate([0, 1], SamplingParams(temperature=1.0, max_tokens=4))
    greedy = SamplingParams(max_tokens=6)
    assert fast.generate([0, 1], greedy).tokens == fast.plain().generate([0, 1], greedy).tokens


def test_identical_tokenizers_need_no_translation() -> None:
    """U71: the same tokenizer on both sides, padded heads of different sizes; guesses are small_model's."""
    tokenizer = letters_tokenizer(10)
    target, draft = ToyModel(10, order=2, seed=3), ToyModel(12, order=2, seed=3)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for shape in ("chain:4", "widths:2,2,1"):
        results = []
        for name in ("cross_tokenizer", "small_model"):
            fast = build_engine(name, shape, target=target, draft=draft, tokenizer=tokenizer)
            results.append(fast.generate([3, 4, 5], params))
        assert results[0].tokens == results[1].tokens
        assert [r.tokens for r in results[0].records] == [r.tokens for r in results[1].records]


@pytest.mark.parametrize("drafter", ["small_model", "cross_tokenizer"])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(10, 12), (12, 10), (12, 12), (10, 10)])
def test_padded_heads_with_one_tokenizer(drafter: str, target_rows: int, draft_rows: int) -> None:
    """U69: 10 tokens, heads of 10 or 12 rows: accepted, and ids 10 and 11 are never proposed nor emitted."""
    tokenizer = letters_tokenizer(10)
    # Order 0 and few tokens: a padding row is the best one somewhere, unless it is cut off.
    target, draft = ToyModel(target_rows, seed=5), ToyModel(draft_rows, seed=5, noise=0.2)
    rows = [target.logits_after(prompt) for prompt in random_prompts(30, 10)]
    assert target_rows == 10 or any(int(row.argmax()) >= 10 for row in rows)
    for temperature in (0.0, 1.5):
        fast = build_engine(drafter, "widths:3,2", target=target, draft=draft, tokenizer=tokenizer)
        for seed, prompt in enumerate(random_prompts(5, 10)):
            params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=seed)
            result = fast.generate(prompt, params)
            assert result.stats.num_draft_tokens > 0
            assert max(result.tokens) < 10
            assert all(max(record.tokens) < 10 for record in result.records)


def test_another_declared_kind_with_the_same_strings() -> None:
    """U75: a WordLevel and a BPE vocabulary that spell every id alike are one vocabulary: the pair is accepted."""
    texts = [END, *"abcdefghi"]
    backend = Backend(models.BPE({text: index for index, text in enumerate(texts)}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    other = Tokenizer(backend, eos_ids=[0])
    target, draft = ToyModel(10, order=2, seed=3), ToyModel(10, order=2, seed=3)
    config = EngineConfig(model="tiny", draft_model="tiny-draft", drafter="small_model", adaptive=False)
    fast = Engine(config, loaded(target, letters_tokenizer(10)), [loaded(draft, other, "tiny-draft")])
    result = fast.generate([3, 4, 5], SamplingParams(max_tokens=20, ignore_eos=True))
    assert result.stats.num_accepted_tokens == result.stats.num_draft_tokens > 5


def test_another_tokenizer_is_sent_to_this_drafter() -> None:
    config = EngineConfig(model="tiny", draft_model="tiny-draft", drafter="small_model")
    target, draft = loaded(ToyModel(12), TARGET), loaded(ToyModel(16), PAIRS, "tiny-draft")
    with pytest.raises(IllegalCombinationError, match="--drafter cross_tokenizer"):
        Engine(config, target, [draft])


@pytest.mark.parametrize("mode", ["text", "intersection"])
def test_a_window_of_the_draft_encoding(mode: str) -> None:
    """U44: the window counts draft tokens, and the cache holds the encoding's recent part."""
    fast = engine(f"{mode},window=8", proposal=ProposalKind.DETERMINISTIC)
    session, params = fast.new_session(), SamplingParams(max_tokens=50, ignore_eos=True)
    prompt = random_prompts(1, TARGET.vocab_size, seed=2)[0]
    result = fast.generate(prompt, params, session)
    assert result.tokens == fast.plain().generate(prompt, params).tokens
    assert result.stats.num_draft_tokens > 30
    (draft,) = session.drafts.values()
    assert isinstance(draft, CrossTokenizerSession)
    encoding = draft.encoding.tokens
    assert len(encoding) > 16
    start = draft.window.start(len(encoding))
    assert start > 0
    assert draft.covered == encoding[start : start + len(draft.covered)]


def test_an_interrupted_prefill_leaves_what_it_kept_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two chunks of a long prompt: the session knows what its cache covers; the next turn is right."""
    fast = engine("text")
    session, params = fast.new_session(), SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = random_prompts(1, TARGET.vocab_size, seed=2)[0] * 4
    monkeypatch.setattr("outrider.models.base.PREFILL_ROWS", 8)
    original, calls = Speller.forward, 0

    def interrupted(self: Speller, *args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return original(self, *args, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Speller, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fast.generate(prompt, params, session)
    (draft,) = session.drafts.values()
    assert isinstance(draft, CrossTokenizerSession)
    assert len(draft.covered) == draft.cache.length == 8
    assert fast.generate(prompt, params, session).tokens == fast.plain().generate(prompt, params).tokens
    assert draft.covered == draft.encoding.tokens[: draft.cache.length]
