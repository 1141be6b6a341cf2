"""The hybrid: who is asked and who guesses, what the tree is told as, what it refuses, and that its law is exact."""

from __future__ import annotations

import pytest

from drafters.test_ensemble import paths, session_of
from engine.tiny_engines import build_engine, distance_from_plain, letters_tokenizer, random_prompts
from outrider.config import EngineConfig
from outrider.drafters.base import DraftBudget, DraftSession, Observation, Proposal
from outrider.drafters.hybrid import HybridSession
from outrider.engine.build import plan_parts
from outrider.engine.engine import Engine
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Regime

BUDGET = DraftBudget(64, 8)
DRAWS = "layer_skip:2@widths:1,2"
UNSURE = "layer_skip:1@chain:2,stop=0.6"
"""Silent behind one of the two tokens of ``two_tokens``, and not behind the other."""
NEVER_SURE = "(layer_skip:2@chain:8,stop=1.0)"


def hybrid_of(drafter: str, temperature: float = 0.0) -> HybridSession:
    session, _ = session_of(build_engine(drafter), temperature)
    assert isinstance(session, HybridSession)
    return session


def record_asked(monkeypatch: pytest.MonkeyPatch, session: HybridSession) -> list[int]:
    """Indices of members as they are asked."""
    asked: list[int] = []

    def watch(index: int, member: DraftSession) -> None:
        original = member.propose

        def propose(budget: DraftBudget) -> Proposal:
            asked.append(index)
            return original(budget)

        monkeypatch.setattr(member, "propose", propose)

    for index, member in enumerate(session.members):
        watch(index, member)
    return asked


def alone(drafter: str, shape: str) -> set[tuple[int, ...]]:
    session, _ = session_of(build_engine(drafter, shape))
    return paths(session.propose(BUDGET).tree)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_member_with_a_guess_guesses_alone(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    session = hybrid_of("hybrid:replay:1.0@chain:3+layer_skip:2@widths:2,1", temperature)
    asked = record_asked(monkeypatch, session)
    tree = session.propose(BUDGET).tree
    assert asked == [0]
    assert tree.drafted == 3
    if not temperature:
        assert paths(tree) == alone("replay:1.0", "chain:3")


@pytest.mark.parametrize("silent", ["ngram@chain:8", "suffix@best_first:6", NEVER_SURE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_silent_member_passes_on(monkeypatch: pytest.MonkeyPatch, silent: str, temperature: float) -> None:
    """Text that repeats nothing, and a model that is never sure enough."""
    session = hybrid_of(f"hybrid:{silent}+{NEVER_SURE}+layer_skip:3@widths:2,1", temperature)
    session.observe(Observation([0]))  # a token that the text of ``session_of`` does not have
    asked = record_asked(monkeypatch, session)
    tree = session.propose(BUDGET).tree
    assert asked == [0, 1, 2]
    assert tree.drafted >= 2
    assert tree.kind is (ProposalKind.PER_SOURCE if temperature else ProposalKind.DETERMINISTIC)


def test_no_guess_at_all_is_an_empty_tree() -> None:
    for temperature, kind in ((0.0, ProposalKind.DETERMINISTIC), (1.0, ProposalKind.PER_SOURCE)):
        session = hybrid_of(f"hybrid:{NEVER_SURE}+{NEVER_SURE}", temperature)
        tree = session.propose(BUDGET).tree
        assert (tree.drafted, tree.kind) == (0, kind)


def test_the_budget_is_not_divided() -> None:
    session = hybrid_of("hybrid:replay:1.0@chain:8+layer_skip:2@chain:8")
    assert session.propose(DraftBudget(5, 8)).tree.drafted == 5
    assert hybrid_of(f"hybrid:{NEVER_SURE}+layer_skip:2@chain:8").propose(DraftBudget(5, 8)).tree.drafted == 5


@pytest.mark.parametrize(
    ("drafter", "size"), [("replay@chain:3+ngram@chain:7", 7), ("replay@chain:9+ngram@chain:7", 9)]
)
def test_the_largest_member_is_the_tree_size(drafter: str, size: int) -> None:
    assert build_engine(f"hybrid:{drafter}")._lanes[Regime.GREEDY].drafter.tree_size == size


def test_accepted_guesses_count_for_the_member_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that was silent, or not asked, is told that nothing of its own was accepted."""
    session = hybrid_of(f"hybrid:{NEVER_SURE}+replay:1.0@chain:4+ngram")
    told: list[tuple[int, int]] = []
    for index, member in enumerate(session.members):
        monkeypatch.setattr(member, "observe", lambda seen, index=index: told.append((index, seen.accepted)))
    tree = session.propose(BUDGET).tree
    guesses = tree.path_tokens(2)
    session.observe(Observation([*guesses, 1], accepted=2))
    session.observe(Observation([*guesses, 1], accepted=2))  # behind a step in which nobody was asked
    assert told == [(0, 0), (1, 2), (2, 0), (0, 0), (1, 0), (2, 0)]


# -- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter",
    [
        "hybrid",
        "hybrid:ngram@chain:3+small_model@widths:2,1",
        "hybrid:(layer_skip:2@chain:2,stop=0.5)+(suffix@best_first:6)",
    ],
)
def test_greedy_text_is_plain(drafter: str) -> None:
    engine = build_engine(drafter)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for prompt in random_prompts(3, 12, seed=5):
        result = engine.generate(prompt, params)
        assert result.tokens == engine.plain().generate(prompt, params).tokens
        assert result.stats.num_draft_tokens > 0


def two_tokens(drafter: str) -> Engine:
    target = ToyModel(2, order=1, sharpness=0.9, seed=10)
    return build_engine(drafter, target=target, tokenizer=letters_tokenizer(2, with_end=False), max_nodes=5)


@pytest.mark.parametrize(
    "drafter",
    [
        f"hybrid:({UNSURE})+(layer_skip:3@widths:2)",
        f"hybrid:(ngram@chain:2)+({DRAWS})",
        f"hybrid:({UNSURE})+(ngram:min_match=1@chain:2)",
    ],
    ids=["both draw", "the second draws", "the first draws"],
)
def test_the_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """By enumeration, with two members that both guess in it, each where the other does not."""
    guessed = set()
    original = HybridSession.propose

    def propose(session: HybridSession, budget: DraftBudget) -> Proposal:
        proposal = original(session, budget)
        guessed.update(index for index, tree in enumerate(session._trees) if tree is not None and tree.drafted)
        return proposal

    monkeypatch.setattr(HybridSession, "propose", propose)
    engine = two_tokens(drafter)
    params = SamplingParams(temperature=1.0, max_tokens=4)
    far, accepted = distance_from_plain(monkeypatch, engine, [0, 1], params)
    assert guessed == {0, 1}
    assert accepted > 0
    assert far < 1e-12


def test_proposal_kinds() -> None:
    def kind(drafter: str, regime: Regime, proposal: ProposalKind | None = None) -> ProposalKind:
        return plan_parts(EngineConfig(drafter=drafter, proposal=proposal), regime).draft.proposal

    mixed, fixed = f"hybrid:ngram+({DRAWS})", "hybrid:ngram+replay"
    assert kind(mixed, Regime.GREEDY) is ProposalKind.DETERMINISTIC
    assert kind(mixed, Regime.SAMPLED) is ProposalKind.PER_SOURCE
    assert kind(mixed, Regime.SAMPLED, ProposalKind.DETERMINISTIC) is ProposalKind.DETERMINISTIC
    assert kind(fixed, Regime.SAMPLED) is ProposalKind.DETERMINISTIC
    for drafter, proposal in ((mixed, ProposalKind.IID), (fixed, ProposalKind.PER_SOURCE)):
        with pytest.raises(IllegalCombinationError, match="leave --proposal out"):
            kind(drafter, Regime.SAMPLED, proposal)


def test_every_members_guesses_are_told_as_the_kind_that_was_planned() -> None:
    """At temperature 1 the verifier expects per_source, also where the look-up guesses, which draws nothing."""
    for drafter in ("hybrid:replay:1.0@chain:3+layer_skip:2", f"hybrid:{NEVER_SURE}+({DRAWS})"):
        tree = hybrid_of(drafter, temperature=1.0).propose(BUDGET).tree
        assert tree.drafted >= 2
        assert tree.kind is ProposalKind.PER_SOURCE
    assert hybrid_of("hybrid:replay:1.0+ngram", temperature=1.0).propose(BUDGET).tree.kind is ProposalKind.DETERMINISTIC


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("hybrid:ngram", "hybrid needs two members or more, got 'ngram': hybrid:"),
        ("hybrid:ngram+lookahead", "hybrid"),
        ("hybrid:ngram+(hybrid:ngram+replay)", "hybrid.*cannot be a member"),
        ("ensemble:ngram+(hybrid:ngram+replay)", "hybrid.*cannot be a member"),
        ("hybrid:ngram+", "a member has no name"),
    ],
)
def test_refusals(drafter: str, message: str) -> None:
    with pytest.raises((IllegalCombinationError, InvalidOptionError), match=message):
        build_engine(drafter)
