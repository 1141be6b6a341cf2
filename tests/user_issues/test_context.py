"""The ends of the two models' contexts, and what a long text costs the draft model."""

from __future__ import annotations

import pytest
from torch import Tensor

from engine.tiny_engines import build_engine
from outrider.drafters.small_model import SmallModel, SmallModelSession
from outrider.errors import ContextLengthError, InvalidOptionError
from outrider.models.base import FULL, Sublayers
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, Regime
from user_issues.toy_decoding import Watched, plain_text, step_by_step

ON = SamplingParams(ignore_eos=True)


def markov(context_length: int = 4096, noise: float = 0.0) -> Watched:
    return Watched(vocab_size=12, order=2, seed=3, context_length=context_length, noise=noise)


def test_context_lookahead_shrinks_u39() -> None:
    """The draft looked beyond the cache's size (4092 + 5 > 4096) and an assertion ended the request.

    Context 16, prompt 13, 5 guesses a step: the last three tokens come, as plain decoding's, with fewer guesses.
    """
    prompt = [1 + i % 11 for i in range(13)]
    for drafter in ("small_model", "layer_skip", "replay:1.0", "ngram:min_match=1"):
        target, draft = markov(16), markov(16)
        engine = build_engine(drafter, "chain:5", target=target, draft=draft if drafter == "small_model" else None)
        result = engine.generate(prompt, ON)
        assert result.tokens == plain_text(target, prompt, 3)
        assert result.finish_reason is FinishReason.CONTEXT


def test_context_limit_excludes_the_reserve_u41() -> None:
    """The default length was computed from a context that counted room for guesses; it crashed near the limit.

    A prompt of all but one place gives one token, whatever the tree; one place more is refused with the true limit.
    """
    prompt = [1 + i % 11 for i in range(31)]
    for shape in ("chain:1", "chain:16", "widths:3,3,3"):
        target = markov(32)
        engine = build_engine("small_model", shape, target=target, draft=markov(32))
        assert engine.generate(prompt, ON).tokens == plain_text(target, prompt, 1)
        assert len(engine.generate(prompt[:20], ON).tokens) == 12
        with pytest.raises(ContextLengthError, match="holds 32; shorten it to 31 at most"):
            engine.generate([*prompt, 1], ON)


def test_context_verify_batch_is_capped_u42() -> None:
    """A batch of 16 rows was verified with 8 places left.

    No pass of target or draft writes beyond the context of 64, though the guesses are perfect and nothing stops them.
    """
    target, draft = markov(64), markov(64)
    engine = build_engine("small_model", "chain:16,stop=0", target=target, draft=draft)
    prompt = [1 + i % 11 for i in range(56)]
    result = engine.generate(prompt, ON)
    assert result.tokens == plain_text(target, prompt, 8)
    assert max(record.drafted for record in result.records) == 6  # the next token and the last one are no guesses
    for call in (*target.calls, *draft.calls):
        assert call.start + call.rows <= 64


def test_context_sliding_draft_window_u44() -> None:
    """Past the end of a smaller draft context every step read the draft's whole window again.

    With a window of 32 over 500 tokens the draft cache stays small, a step reads at most half a window again, and all
    reading together is about one token for each committed one.
    """
    target, draft = markov(), markov(noise=0.2)
    engine = build_engine("small_model:window=32", "chain:5", target=target, draft=draft)
    result = engine.generate([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
    assert result.tokens == plain_text(target, [1, 2, 3], 500)
    read = [call.rows for call in draft.calls if call.chose_rows]
    assert len(read) == sum(record.drafted > 0 for record in result.records)
    assert max(read) <= 16 + 6
    # The first guess of a step is read with the text; the others were evaluated while guessing.
    assert sum(read) <= 2.2 * 500
    assert max(call.start + call.rows for call in draft.calls) <= 32 + 5
    assert result.stats.num_accepted_tokens > 200


class TrainedUpTo(Watched):
    """A draft model that is the target up to a length of text, and says the worst token beyond it."""

    length = 200

    def _logits(self, view: object, skip: Sublayers = FULL) -> Tensor:
        logits = super()._logits(view, skip)  # type: ignore[arg-type]
        return logits if len(view) < self.length else -logits  # type: ignore[arg-type]


def test_context_beyond_the_trained_length_u45(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head trained on 2048 tokens made longer texts slower than plain decoding, and nothing said so.

    Acceptance falls to nothing at 200 tokens: the controller turns guessing off; the statistics show why.
    """
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    forward = ToyModel.forward

    def timed(model: ToyModel, *args: object, **options: object) -> object:
        now[0] += 0.004 if isinstance(model, TrainedUpTo) else 0.02
        return forward(model, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ToyModel, "forward", timed)
    target, draft = ToyModel(vocab_size=12), TrainedUpTo(vocab_size=12)
    engine = build_engine("small_model", "chain:4", target=target, draft=draft, adaptive=True)
    result = engine.generate([1, 2], SamplingParams(max_tokens=480, ignore_eos=True))
    assert result.tokens == plain_text(target, [1, 2], 480)
    early = [record for record in result.records if 80 <= record.position < 190]
    late = [record for record in result.records if record.position >= 300]
    assert sum(record.drafted >= 3 for record in early) > 0.6 * len(early)
    assert sum(record.drafted == 0 for record in late) > 0.9 * len(late)
    assert sum(record.accepted for record in late) == 0
    seconds = sum(record.times.total for record in late)
    assert seconds < 1.05 * 0.02 * len(late)


def test_context_draft_asks_only_for_needed_rows_u46() -> None:
    """The draft context was given the verified batch with logits for every row, more than its output could hold.

    With chains of 8 every draft pass asks for one row of logits, however many tokens it reads.
    """
    target, draft = markov(), markov(noise=0.1)
    engine = build_engine("small_model", "chain:8", target=target, draft=draft)
    prompt = [1 + i % 11 for i in range(40)]
    result = engine.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    assert {call.logits for call in draft.calls} == {1}
    assert {call.rows for call in draft.calls} >= {1, 2, 41}
    assert len(draft.calls) == sum(record.drafted for record in result.records)


def test_context_draft_window_is_the_configured_one_u47() -> None:
    """The draft model ignored the context length that was set for it.

    The window asked for is the one in use; without one the draft takes the target's context, or its own if shorter,
    less room for guesses; one that cannot be kept is refused.
    """

    def window(spec: str, draft_context: int) -> int:
        engine = build_engine(spec, "chain:3", target=markov(512), draft=markov(draft_context))
        drafter = engine.lane(Regime.GREEDY).drafter
        assert isinstance(drafter, SmallModel)
        covered = 0
        for _, sequence in step_by_step(engine, [1, 2], SamplingParams(max_tokens=70, ignore_eos=True)):
            assert isinstance(sequence.session, SmallModelSession)
            covered = max(covered, len(sequence.session.covered))
        # The guesses just accepted may stand beyond the window until it moves.
        assert covered > 60 if drafter.window.size == 0 else covered <= drafter.window.size + 3
        return drafter.window.size

    assert window("small_model:window=16", 4096) == 16
    assert window("small_model:window=20", 64) == 20
    assert window("small_model", 512) == window("small_model", 4096) == 0
    assert window("small_model", 40) == 30
    with pytest.raises(InvalidOptionError, match="give at most 30"):
        window("small_model:window=31", 40)
