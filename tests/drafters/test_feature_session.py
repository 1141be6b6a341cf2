"""A recurrent head's cache holds pairs made of the target's own features, whatever happens to the sequence.

A toy target's hidden states name the very prefix that they were computed under, so a pair made of a rejected guess's
features, of the head's own state, or one row off, differs from the fresh computation that every step is compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.tiny_engines import build_engine, random_prompts
from heads.tiny_heads import head_file
from outrider.drafters.base import DraftBudget, DraftContext, Observation, Proposal
from outrider.drafters.feature_session import RecurrentHeadSession
from outrider.engine.engine import Engine, Session
from outrider.heads.cached import CachedHead, HeadCache
from outrider.heads.network import RecurrentNetwork
from outrider.heads.registry import NETWORKS, network_class
from outrider.models.base import Segment
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.chain import Chain

METHODS = [name for name in NETWORKS if issubclass(network_class(name), RecurrentNetwork)]
SHAPES = ["chain:4", "widths:2,2,1", "best_first:8,preset=eagle2", "static:eagle_25"]
VOCABULARY = 6
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(5, VOCABULARY, seed=5, longest=12)


def fresh_cache(session: RecurrentHeadSession, count: int) -> HeadCache:
    """``count`` pairs of the session's text from its first one on, from one pass of the target and one of the head."""
    head, names, first = session.head, session.head.config.features, session.first
    cache = head.new_cache()
    if count:
        prefix = session.tokens[: first + count]
        states = session.target.forward([Segment(session.target.new_cache(), prefix)], names)[0].hidden
        token = session.target.embed(torch.tensor(session.tokens[first + 1 : first + count + 1])).to(head.dtype)
        state = head.fuse({name: states[name][first:] for name in names})
        head.forward(cache, token, state, range(first, first + count))
        cache.commit()
    return cache


def check(session: RecurrentHeadSession, tolerance: float = 1e-5) -> None:
    """What is cached equals the fresh computation; what waits are the very features of the rows that follow."""
    cached = session.cache.length
    assert session.cache.scratch == 0
    assert session.first + cached <= max(0, len(session.tokens) - 1)
    expected = fresh_cache(session, cached).entries[:, :cached]
    torch.testing.assert_close(session.cache.entries[:, :cached], expected, atol=tolerance, rtol=tolerance)
    if session._waiting:
        names, prefix = session.head.config.features, session.tokens[:-1]
        states = session.target.forward([Segment(session.target.new_cache(), prefix)], names)[0].hidden
        for name in names:
            waiting = torch.cat([part[name] for part in session._waiting])
            expected = states[name][session.first + cached :]
            torch.testing.assert_close(waiting, expected, atol=tolerance, rtol=tolerance)


class Watch:
    """Checks every session after every ``begin``, ``observe``, ``propose`` and ``end``; counts what it saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tolerance: float = 1e-5) -> None:
        self.calls: Counter[str] = Counter()
        self.kept: list[int] = []  # pairs that a begin found useful
        self.budget: Callable[[DraftBudget], DraftBudget] = lambda budget: budget
        watch, cls = self, RecurrentHeadSession
        begin, observe, propose, end = cls.begin, cls.observe, cls.propose, cls.end

        def seen(session: RecurrentHeadSession, what: str) -> None:
            check(session, tolerance)
            watch.calls[what] += 1

        def watched_begin(self: RecurrentHeadSession, context: DraftContext) -> None:
            begin(self, context)
            watch.kept.append(self.cache.length)
            seen(self, "begin")

        def watched_observe(self: RecurrentHeadSession, observation: Observation) -> None:
            observe(self, observation)
            assert self.first + self.known == len(self.tokens) - 1
            seen(self, "observe")

        def watched_propose(self: RecurrentHeadSession, budget: DraftBudget) -> Proposal:
            budget = watch.budget(budget)
            proposal = propose(self, budget)
            if budget.max_nodes and budget.max_depth:
                assert self.first + self.cache.length == len(self.tokens) - 1
                assert not self._waiting
            seen(self, "propose")
            return proposal

        def watched_end(self: RecurrentHeadSession) -> None:
            end(self)
            seen(self, "end")

        for name, method in (("begin", watched_begin), ("observe", watched_observe)):
            monkeypatch.setattr(cls, name, method)
        for name, method in (("propose", watched_propose), ("end", watched_end)):
            monkeypatch.setattr(cls, name, method)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def engine_of(
    folder: Path,
    method: str,
    shape: str | None = None,
    target: ToyModel | None = None,
    draft_ids: Sequence[int] = (0, 2, 3, 4),
    window: int = 256,
) -> Engine:
    target = target or ToyModel(VOCABULARY, order=1, sharpness=1.5, seed=4)
    path = head_file(folder / f"{method}.safetensors", method, target, draft_ids, seed=2)
    return build_engine(f"{method}:head={path},window={window}", shape, target=target)


def same_as_plain(engine: Engine, prompts: Sequence[list[int]], session: Session | None = None) -> list[int]:
    """Guesses accepted in each step, once the text is seen to be plain decoding's."""
    accepted = []
    for prompt in prompts:
        result = engine.generate(prompt, PARAMS, session)
        assert result.tokens == engine.plain().generate(prompt, PARAMS).tokens
        accepted += [record.accepted for record in result.records]
    return accepted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_the_cache_is_fresh_after_every_step(tmp_path: Path, watch: Watch, method: str, shape: str) -> None:
    """Invariant 4; steps that kept nothing, a part and more are among them."""
    accepted = same_as_plain(engine_of(tmp_path, method, shape), PROMPTS[:4])
    assert {0, 1} <= set(accepted)
    assert watch.calls["propose"] > 10
    assert watch.calls["observe"] > watch.calls["propose"]


def test_partial_and_whole_acceptance_occur(tmp_path: Path, watch: Watch) -> None:
    """The comparison above saw more than first guesses: trees of all acceptance lengths up to 3."""
    engine = engine_of(tmp_path, "eagle3", "widths:4,3,2", draft_ids=range(VOCABULARY))
    assert {0, 1, 2, 3} <= set(same_as_plain(engine, PROMPTS))


@pytest.mark.parametrize("method", METHODS)
def test_float64_to_the_last_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    watch = Watch(monkeypatch, tolerance=1e-11)
    monkeypatch.setattr("outrider.drafters.feature_session.compute_dtype", lambda target: torch.float64)
    same_as_plain(engine_of(tmp_path, method, "widths:3,2"), PROMPTS[:3])
    assert watch.calls["propose"] > 10


@pytest.mark.parametrize("method", METHODS)
def test_sampled_requests(tmp_path: Path, watch: Watch, method: str) -> None:
    engine = engine_of(tmp_path, method, "widths:2,2")
    for seed in range(4):
        engine.generate(PROMPTS[seed], SamplingParams(temperature=1.0, max_tokens=10, seed=seed, ignore_eos=True))
    assert watch.calls["propose"] > 10


@pytest.mark.parametrize("method", METHODS)
def test_turns_of_a_chat_go_on_from_the_pairs(tmp_path: Path, watch: Watch, method: str) -> None:
    """A longer prompt, a diverging one, a shorter one, the same one, one that shares nothing; and back."""
    engine, session = engine_of(tmp_path, method, "widths:2,2,1"), Session()
    text = [*PROMPTS[0], *engine.generate(PROMPTS[0], PARAMS, session).tokens]
    other = [(text[0] + 1) % VOCABULARY, 2, 3]
    changed = [*text[:9], (text[9] + 1) % VOCABULARY, 1, 5]
    turns = [[*text, 5, 1, 2], changed, changed[:4], changed[:4], other, text]
    watch.kept.clear()
    same_as_plain(engine, turns, session)
    shared = len(text) - 1
    assert watch.kept == [shared, 8, 3, 3, 0, 0]


def test_a_prompt_with_another_last_token_keeps_no_pair_of_the_old_one(tmp_path: Path, watch: Watch) -> None:
    """The pair at row t holds token t + 1: where token t + 1 changed, features at row t alone are still right."""
    engine, session = engine_of(tmp_path, "eagle3", "chain:3"), Session()
    prompt = [1, 2, 3, 4, 5]
    engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), session)
    draft = next(iter(session.drafts.values()))
    assert draft.reusable([1, 2, 3, 4, 0]) == 3
    assert draft.reusable([1, 2, 3, 4, 5]) == 4
    watch.kept.clear()
    same_as_plain(engine, [[1, 2, 3, 4, 0, 2]], session)
    assert watch.kept == [3]


def test_greedy_and_sampled_turns_alternate_on_one_session(tmp_path: Path, watch: Watch) -> None:
    """Each regime has a drafter of its own: what one saw, the other must be shown."""
    engine, session, text = engine_of(tmp_path, "eagle", "widths:2,2"), Session(), list(PROMPTS[1])
    for turn in range(4):
        params = SamplingParams(temperature=float(turn % 2), max_tokens=6, seed=turn, ignore_eos=True)
        result = engine.generate(text, params, session)
        assert result.tokens == engine.generate(text, params).tokens
        text += [*result.tokens, 3]
    assert watch.calls["propose"] > 8


@pytest.mark.parametrize("method", METHODS)
def test_batches(tmp_path: Path, watch: Watch, method: str) -> None:
    """heads.md section 4, item 21: several sequences with their own lengths and trees."""
    engine = engine_of(tmp_path, method, "best_first:8,preset=eagle2")
    requests = [(i, prompt, SamplingParams(max_tokens=4 + 2 * i, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]
    expected = {i: engine.plain().generate(prompt, params).tokens for i, prompt, params in requests}
    for batch, reuse in ((4, False), (2, True)):
        assert {key: result.tokens for key, result in engine.run(requests, batch, reuse)} == expected


@pytest.mark.parametrize("events", [0, 1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_goes_away(tmp_path: Path, watch: Watch, method: str, events: int) -> None:
    engine, session = engine_of(tmp_path, method, "widths:2,2,1"), Session()
    stream = engine.stream(PROMPTS[2], PARAMS, session)
    for _ in range(events):
        next(stream)
    stream.close()
    same_as_plain(engine, [[*PROMPTS[2], 4], PROMPTS[2][:2], PROMPTS[3]], session)


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_while_the_tree_grows(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine, session = engine_of(tmp_path, method, "chain:3"), Session()
    stream, grow = engine.stream(PROMPTS[2], PARAMS, session), Chain.grow

    def failing(*arguments: object) -> object:
        grow(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    next(stream), next(stream)
    monkeypatch.setattr(Chain, "grow", failing)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.setattr(Chain, "grow", grow)
    same_as_plain(engine, [[*PROMPTS[2], 4]], session)


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_while_pairs_are_added(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The pairs on their way are lost; the head then starts behind them, and knows it."""
    engine, session = engine_of(tmp_path, method, "chain:3"), Session()
    stream, forward, calls = engine.stream(PROMPTS[2], PARAMS, session), CachedHead.forward, [0]

    def failing(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] == 1:
            raise KeyboardInterrupt
        return forward(*arguments)  # type: ignore[arg-type]

    next(stream), next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(CachedHead, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    same_as_plain(engine, [[*PROMPTS[2], 4], PROMPTS[2]], session)


@pytest.mark.parametrize("method", METHODS)
def test_steps_without_drafting_are_made_up_for(tmp_path: Path, watch: Watch, method: str) -> None:
    """The controller turned drafting off for a while: pairs wait, then enter together."""
    engine = engine_of(tmp_path, method, "widths:2,2")
    steps = [0]

    def every_fourth(budget: DraftBudget) -> DraftBudget:
        steps[0] += 1
        return budget if steps[0] % 4 == 0 else DraftBudget(0, budget.max_depth)

    watch.budget = every_fourth
    same_as_plain(engine, PROMPTS[:3])
    assert steps[0] > 20


def test_a_head_that_was_off_for_a_whole_turn(tmp_path: Path, watch: Watch) -> None:
    """Pairs of the first turn are still waiting when the second begins."""
    engine, session = engine_of(tmp_path, "eagle3", "widths:2,2"), Session()
    watch.budget = lambda budget: DraftBudget(0, budget.max_depth)
    text = [*PROMPTS[0], *engine.generate(PROMPTS[0], PARAMS, session).tokens]
    watch.budget = lambda budget: budget
    watch.kept.clear()
    same_as_plain(engine, [[*text[:7], (text[7] + 1) % VOCABULARY, 2]], session)
    assert watch.kept == [6]


def test_a_target_that_cannot_go_back_is_seen_anew(tmp_path: Path, watch: Watch) -> None:
    """U61: a wrapped sliding window; the target starts over, and so does the head."""
    target = ToyModel(VOCABULARY, window=5, seed=4)
    engine, session = engine_of(tmp_path, "eagle3", "widths:2,2", target), Session()
    text = [*PROMPTS[0], *engine.generate(PROMPTS[0], PARAMS, session).tokens]
    same_as_plain(engine, [[*text, 2], [*text[:4], 5]], session)
    assert watch.kept[-1] == 0


def test_long_prompts_arrive_in_pieces(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's prefill and the head's are cut into chunks, at different places."""
    monkeypatch.setattr("outrider.schedules.synchronous.PREFILL_ROWS", 7)
    monkeypatch.setattr("outrider.drafters.feature_session.PREFILL_ROWS", 5)
    prompt = random_prompts(1, VOCABULARY, seed=8, longest=60)[0] * 2
    assert len(prompt) > 20
    same_as_plain(engine_of(tmp_path, "eagle3", "chain:3"), [prompt])


@pytest.mark.parametrize("method", METHODS)
def test_the_beginning_of_a_long_prompt_is_left_out(tmp_path: Path, watch: Watch, method: str) -> None:
    """A chat goes on from the pairs that there are, and the target keeps its entries; a short prompt loses nothing."""
    engine, session = engine_of(tmp_path, method, "widths:2,2", window=6), Session()
    text = [*PROMPTS[0], *PROMPTS[1], *PROMPTS[2]]
    assert len(text) > 12
    same_as_plain(engine, [text], session)
    draft = next(iter(session.drafts.values()))
    assert isinstance(draft, RecurrentHeadSession)
    # The prompt's last row comes with the first token: seven rows waited when the first tree was asked for.
    first = draft.first
    assert first == len(text) - 6
    text = [*text, *engine.plain().generate(text, PARAMS).tokens]
    watch.kept.clear()
    same_as_plain(engine, [[*text, 3, 4], [*text[:-2], 5], [*text, *PROMPTS[0], *PROMPTS[1]], text[:3]], session)
    assert watch.kept[0] == len(text) - 1 - first
    assert watch.kept[-1] == 0
    assert draft.first == 0


def test_a_window_of_nothing_reads_everything(tmp_path: Path, watch: Watch) -> None:
    engine, session = engine_of(tmp_path, "eagle3", "chain:2", window=0), Session()
    same_as_plain(engine, [[*PROMPTS[0], *PROMPTS[1]]], session)
    draft = next(iter(session.drafts.values()))
    assert isinstance(draft, RecurrentHeadSession)
    assert draft.first == 0


# -- faults that the comparison must see -----------------------------------------------------------------------


def test_a_head_that_keeps_its_own_guesses_is_caught(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """heads.md section 4, item 13: entries made of the head's own states (planted) stay behind the committed ones."""
    monkeypatch.setattr(HeadCache, "rollback", HeadCache.commit)
    with pytest.raises(AssertionError):
        same_as_plain(engine_of(tmp_path, "eagle", "chain:3"), PROMPTS)


def test_features_of_another_row_are_caught(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the last accepted row's features are those of the row before."""
    observe = RecurrentHeadSession.observe

    def shifted(self: RecurrentHeadSession, observation: Observation) -> None:
        hidden = {name: torch.cat([state[:1], state[:-1]]) for name, state in observation.hidden.items()}
        observe(self, Observation(observation.committed, hidden, None, observation.accepted, observation.prompt_hidden))

    monkeypatch.setattr(RecurrentHeadSession, "observe", shifted)
    with pytest.raises(AssertionError):
        same_as_plain(engine_of(tmp_path, "eagle", "widths:4,2"), PROMPTS)
