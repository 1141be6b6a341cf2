"""What every registered drafter owes its schedule, discovered from the registry.

A proposal is rooted in the last committed token, keeps its budget, draws under its own keys, leaves no trace in the
target's cache, and does not depend on how the committed text was split into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.tiny_engines import VARIANTS, build_engine, combinations, random_prompts
from outrider.drafters.base import DraftBudget, DraftContext, DraftSession, Observation, Proposal
from outrider.drafters.small_model import SmallModelSession
from outrider.engine.engine import Engine
from outrider.engine.registry import DRAFTERS, load_class
from outrider.models.base import FINAL_HIDDEN, Segment, SequenceCache
from outrider.models.toy_cache import ToyCache
from outrider.sampling.draw import Role, SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.types import ProposalKind, Regime

BUILDABLE = sorted({c.drafter for c in combinations(Regime.GREEDY)})
KINDS = sorted({(c.drafter, c.proposal) for c in combinations(Regime.SAMPLED)}, key=str)
PROMPT = [3, 4, 5, 3, 4, 5, 3, 4]


class Recording(SeededStream):
    """A seeded stream that remembers which keys were used, and refuses one that was used before."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.keys: list[tuple[int, Role, int]] = []

    def uniform(self, position: int, role: Role, draw: int) -> float:
        assert (position, role, draw) not in self.keys
        self.keys.append((position, role, draw))
        return super().uniform(position, role, draw)


class Bench:
    """A drafter's session beside a target cache, driven by hand."""

    def __init__(self, drafter: str, proposal: ProposalKind, temperature: float = 1.0) -> None:
        regime = Regime.GREEDY if temperature == 0.0 else Regime.SAMPLED
        self.engine: Engine = build_engine(drafter, "widths:2,2,1", proposal)
        self.drafter = self.engine._lanes[regime].drafter
        self.session: DraftSession = self.drafter.new_session()
        self.random = Recording(7)
        self.params = SamplingParams(temperature=temperature)
        self.text: list[int] = []
        self.prompt_length = 0
        self.cache: SequenceCache = self.engine.model.new_cache()

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request; the first output token is still to come."""
        self.text, self.prompt_length = list(prompt), len(prompt)
        self.random = Recording(7)
        pipeline = LogitsPipeline(self.params, 12, prompt=prompt)
        self.cache = self.engine.model.new_cache()
        self.session.begin(DraftContext(list(prompt), pipeline, self.random, self.engine.model, self.cache))

    def commit(self, tokens: Sequence[int]) -> None:
        """The schedule kept ``tokens``: evaluate the text below the last one and tell the session."""
        self.text += tokens
        fresh = self.text[self.cache.length : -1]
        hidden = {}
        with self.cache.speculation():
            if fresh:
                out = self.engine.model.forward([Segment(self.cache, fresh)], self.drafter.hidden)[0]
                self.cache.commit(range(len(fresh)))
                hidden = {name: state[-len(tokens) :] for name, state in out.hidden.items()}
        self.session.observe(Observation(list(tokens), hidden))

    def propose(self, nodes: int = 64, depth: int = 8) -> Proposal:
        proposal = self.session.propose(DraftBudget(nodes, depth))
        assert self.cache.scratch == 0
        assert isinstance(self.cache, ToyCache)
        assert list(self.cache.tokens) == self.text[:-1]
        return proposal


def test_every_drafter_is_here_or_needs_files() -> None:
    names = {drafter.partition(":")[0] for drafter in BUILDABLE}
    assert names >= {"none", "ngram", "small_model", "layer_skip", "replay"}
    assert names <= set(DRAFTERS)


@pytest.mark.parametrize("name", DRAFTERS)
def test_declarations(name: str) -> None:
    """What ``outrider methods`` and ``engine/build.py`` read."""
    cls = load_class("drafter", name)
    assert cls.summary and cls.source  # noqa: PT018
    assert isinstance(cls.samples, bool)
    assert isinstance(cls.needs_draft_model, bool)
    assert all(h == FINAL_HIDDEN or isinstance(h, int) for h in cls.hidden)
    assert cls.positional is None or cls.positional in cls.Options.model_fields
    assert VARIANTS


@pytest.mark.parametrize(("drafter", "kind"), KINDS)
def test_budget_root_and_kind(drafter: str, kind: ProposalKind) -> None:
    """U38, U42: never more nodes or levels than allowed, and none at all when none are."""
    bench = Bench(drafter, kind)
    bench.begin(PROMPT)
    bench.commit([5])
    for nodes, depth in [(64, 8), (5, 8), (3, 8), (2, 2), (64, 1), (1, 1), (0, 5), (0, 0), (4, 0)]:
        tree = bench.propose(nodes, depth).tree
        assert tree.tokens[0] == bench.text[-1]
        assert tree.drafted <= nodes
        assert max(tree.depths) <= depth
        assert tree.drafted == 0 or tree.kind is kind
        assert all(0 <= token < 12 for token in tree.tokens)
        assert all(tree.sources[1:])
        bench.commit([3 + len(bench.text) % 3])


@pytest.mark.parametrize(("drafter", "kind"), KINDS)
def test_draws_are_keyed_and_reproducible(drafter: str, kind: ProposalKind) -> None:
    """Invariant 7: only draft keys, each used once, at the position where the step began; same seed, same tree."""
    trees = []
    for _ in range(2):
        bench = Bench(drafter, kind)
        bench.begin(PROMPT)
        bench.commit([5])
        for token in (3, 4):
            before = len(bench.random.keys)
            tree = bench.propose().tree
            trees.append((tree.tokens, tree.parents))
            new = bench.random.keys[before:]
            assert {(position, role) for position, role, _ in new} <= {(len(bench.text) - len(PROMPT), Role.DRAFT)}
            # A merged tree may hold the guesses of members that rank alone; what was drawn brings its distribution.
            has_drawn = bool(tree.rows) if kind is ProposalKind.PER_SOURCE else tree.drafted > 0
            if kind is not ProposalKind.DETERMINISTIC and has_drawn:
                assert new
            bench.commit([token])
    assert trees[:2] == trees[2:]


@pytest.mark.parametrize("drafter", BUILDABLE)
def test_steps_of_any_size_give_the_same_guesses(drafter: str) -> None:
    """Invariant 4: state depends on the committed text alone, not on how it arrived, was guessed or proposed before."""
    output = [5, 3, 4, 5, 1, 2, 5, 3, 4]
    trees = []
    for sizes in ([9], [1] * 9, [1, 4, 4], [2, 1, 6]):
        bench = Bench(drafter, ProposalKind.DETERMINISTIC, temperature=0.0)
        bench.begin(PROMPT)
        start = 0
        for size in sizes:
            if start:
                bench.propose()
            bench.commit(output[start : start + size])
            start += size
        trees.append(bench.propose().tree)
    assert all(tree.tokens == trees[0].tokens and tree.parents == trees[0].parents for tree in trees)


@pytest.mark.parametrize("drafter", BUILDABLE)
def test_accepted_guesses_then_another_request(drafter: str) -> None:
    """U65: commit every path of a proposal in turn; then begin again with prompts that share something or nothing."""
    for leaf in range(6):
        bench = Bench(drafter, ProposalKind.DETERMINISTIC, temperature=0.0)
        bench.begin(PROMPT)
        bench.commit([5])
        tree = bench.propose().tree
        path = tree.path_tokens(min(leaf, len(tree) - 1))
        bench.commit([*path, 9])
        _check_small_model(bench)
        for prompt in (bench.text, [*bench.text[:5], 8, 8], bench.text[:3], [1, 2, 1]):
            bench.session.end()
            fresh = Bench(drafter, ProposalKind.DETERMINISTIC, temperature=0.0)
            for one in (bench, fresh):
                one.begin(list(prompt))
                one.commit([5])
            again, expected = bench.propose().tree, fresh.propose().tree
            assert (again.tokens, again.parents) == (expected.tokens, expected.parents)
            bench.commit([*again.path_tokens(len(again) - 1), 9])
            _check_small_model(bench)


def _check_small_model(bench: Bench) -> None:
    if isinstance(bench.session, SmallModelSession):
        cache = bench.session.cache
        assert isinstance(cache, ToyCache)
        assert cache.scratch == 0
        assert list(cache.tokens) == bench.text[: cache.length]


@pytest.mark.parametrize("drafter", BUILDABLE)
def test_end_may_come_at_any_moment_and_twice(drafter: str) -> None:
    bench = Bench(drafter, ProposalKind.DETERMINISTIC, temperature=0.0)
    bench.session.end()
    for steps in range(3):
        bench.begin(random_prompts(1, 12, seed=steps)[0])
        for _ in range(steps):
            bench.commit([5])
            bench.propose()
        bench.session.end()
        bench.session.end()
    bench.begin(PROMPT)
    bench.commit([5])
    assert bench.propose().tree.tokens[0] == 5
