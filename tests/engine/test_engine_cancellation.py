"""Whatever interrupts a request, caches are rolled back, the session goes on, and nothing is leaked."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from engine.test_engine_caches import check_caches
from engine.tiny_engines import build_engine, random_prompts
from outrider.drafters.base import DraftContext
from outrider.drafters.small_model import SmallModelSession
from outrider.engine.engine import Engine, Session
from outrider.engine.result import Event
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.chain import Chain
from outrider.trees.shapes.widths import Widths
from outrider.types import FinishReason
from outrider.verifiers.greedy import Greedy

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)
NEXT = SamplingParams(max_tokens=10, ignore_eos=True)
PROMPT, OTHER = random_prompts(2, 12, seed=41)
DRAFTERS = ["none", "ngram", "small_model", "layer_skip", "replay:0.8"]


class PlantedError(Exception):
    """Planted."""


def failing(call: Callable[..., object], at: int, error: type[BaseException], after: bool) -> Callable[..., object]:
    """``call``, but the ``at``-th call raises, before or after having done its work."""
    count = [0]

    def wrapper(*args: object, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == at and not after:
            raise error
        result = call(*args, **kwargs)
        if count[0] == at:
            raise error
        return result

    return wrapper


def continues_as_plain(engine: Engine, session: Session, text: list[int]) -> None:
    """The session serves the next turns as if nothing had happened."""
    plain = engine.plain()
    for prompt in ([*text, 7], text[:4], OTHER):
        assert engine.generate(prompt, NEXT, session).tokens == plain.generate(prompt, NEXT).tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stream_closed_early(drafter: str) -> None:
    """A client that goes away after any number of events, also before the first one."""
    engine = build_engine(drafter, "chain:4")
    expected = list(engine.plain().generate(PROMPT, PARAMS).tokens)
    for events in range(6):
        session = engine.new_session()
        stream = engine.stream(PROMPT, PARAMS, session)
        seen: list[Event] = [next(stream) for _ in range(events)]
        stream.close()  # type: ignore[attr-defined]
        text = [*PROMPT, *(token for event in seen for token in event.tokens)]
        assert text[len(PROMPT) :] == expected[: len(text) - len(PROMPT)]
        if events:
            check_caches(session, text, covered=len(text) - 1)
        continues_as_plain(engine, session, text)


SITES: list[tuple[object, str, str]] = [
    (ToyModel, "forward", "model"),
    (Greedy, "verify", "verifier"),
    (Chain, "grow", "shape"),
    (Widths, "grow", "shape"),
    (ToyCache, "commit", "commit"),
    (SmallModelSession, "observe", "observe"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [PlantedError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "method", "what"), SITES, ids=[f"{o.__name__}.{m}" for o, m, _ in SITES])  # type: ignore[attr-defined]
def test_an_exception_anywhere(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, what: str, error: type[BaseException], after: bool
) -> None:
    """Raised by the n-th call of model, verifier, shape, commit or drafter: out it comes, and on we go."""
    shape = "widths:2,2" if owner is Widths else "chain:4"
    raised = 0
    for drafter in ("small_model", "layer_skip"):
        for at in (1, 2, 3, 7):
            engine, session = build_engine(drafter, shape), Session()
            seen: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, failing(getattr(owner, method), at, error, after))
                try:
                    for event in engine.stream(PROMPT, PARAMS, session):
                        seen += event.tokens
                except error:
                    raised += 1
            assert session.cache is not None
            assert session.cache.scratch == 0
            text = [*PROMPT, *engine.plain().generate(PROMPT, PARAMS).tokens]
            assert list(session.cache.tokens) == text[: session.cache.length]  # type: ignore[attr-defined]
            assert seen == text[len(PROMPT) :][: len(seen)]
            continues_as_plain(engine, session, [*PROMPT, *seen])
    assert raised >= 4


def test_an_exception_in_a_batch_rolls_everybody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine("small_model", "chain:4")
    requests = [(i, p, PARAMS) for i, p in enumerate(random_prompts(4, 12, seed=2))]
    expected = {key: result.tokens for key, result in engine.run(requests, batch=3)}
    before = _alive()
    with monkeypatch.context() as patch:
        patch.setattr(Greedy, "verify", failing(Greedy.verify, 11, PlantedError, after=False))
        with pytest.raises(PlantedError):
            list(engine.run(requests, batch=3))
    assert {key: result.tokens for key, result in engine.run(requests, batch=3)} == expected
    assert _alive() == before


def test_leaving_a_batch_early() -> None:
    engine = build_engine("small_model", "chain:4")
    before = _alive()
    run = engine.run([(i, p, PARAMS) for i, p in enumerate(random_prompts(4, 12, seed=2))], batch=3)
    key, result = next(run)
    run.close()  # type: ignore[attr-defined]
    assert result.tokens == engine.generate(random_prompts(4, 12, seed=2)[key], PARAMS).tokens  # type: ignore[call-overload]
    assert _alive() == before


def test_a_batch_left_early_ends_every_draft_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that hold something outside their session learn of the end, of cancelled neighbours too."""
    begun: set[int] = set()
    begin, end = SmallModelSession.begin, SmallModelSession.end

    def spy_begin(self: SmallModelSession, context: DraftContext) -> None:
        begin(self, context)  # ends what came before, then
        begun.add(id(self))

    def spy_end(self: SmallModelSession) -> None:
        begun.discard(id(self))
        end(self)

    monkeypatch.setattr(SmallModelSession, "begin", spy_begin)
    monkeypatch.setattr(SmallModelSession, "end", spy_end)
    engine = build_engine("small_model", "chain:4")
    short = PARAMS.model_copy(update={"max_tokens": 2})
    run = engine.run([(0, PROMPT, short), (1, OTHER, PARAMS), (2, PROMPT, PARAMS)], batch=3)
    next(run)
    assert len(begun) == 2
    run.close()  # type: ignore[attr-defined]
    assert begun == set()


def test_a_cancelled_request_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine closes for a vanished client is a result with reason ``cancelled``."""
    reasons = []
    original = Engine._close

    def spy(self: Engine, active: object) -> object:
        result = original(self, active)  # type: ignore[arg-type]
        reasons.append(result.finish_reason)
        return result

    monkeypatch.setattr(Engine, "_close", spy)
    stream = build_engine("ngram").stream(PROMPT, PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert reasons == [FinishReason.CANCELLED]


def test_no_leak_over_many_requests() -> None:
    """U82: 500 requests, some cut off, some refused, one session kept: as many caches as before, none with scratch."""
    engine = build_engine("small_model", "widths:2,2")
    session = engine.new_session()
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.generate(PROMPT, short, session)
    before = _alive()
    for index in range(500):
        if index % 3 == 0:
            stream = engine.stream(PROMPT, short)
            next(stream)
            del stream
        else:
            engine.generate(PROMPT, short, session if index % 3 == 1 else None)
    assert _alive() == before
    assert all(cache.scratch == 0 for cache in gc.get_objects() if type(cache) is ToyCache)


def _alive() -> int:
    gc.collect()
    return sum(type(thing) is ToyCache for thing in gc.get_objects())
