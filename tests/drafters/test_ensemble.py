"""The ensemble: what it unites, how it shares the budget, what it refuses, and that its law is exact."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, distance_from_plain, letters_tokenizer, random_prompts
from outrider.config import EngineConfig
from outrider.drafters.base import DraftBudget, DraftContext, DraftSession, Observation
from outrider.drafters.ensemble import EnsembleSession, equal_shares, mean_scores
from outrider.engine.build import plan_parts
from outrider.engine.engine import Engine
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.models.base import Segment
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.merge import merge
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime

TWO = "ensemble:layer_skip:2@widths:1,2+layer_skip:3@widths:2"
PROMPT = [0, 1]


def session_of(engine: Engine, temperature: float = 0.0) -> tuple[DraftSession, list[int]]:
    """A begun session of the engine's drafter, and the text it continues."""
    prompt = random_prompts(1, 12, seed=3)[0]
    regime = Regime.SAMPLED if temperature else Regime.GREEDY
    session = engine._lanes[regime].drafter.new_session()
    cache = engine.model.new_cache()
    engine.model.forward([Segment(cache, prompt)])
    cache.commit(range(len(prompt)))
    pipeline = LogitsPipeline(SamplingParams(temperature=temperature), 12, prompt=prompt)
    session.begin(DraftContext(prompt, pipeline, SeededStream(1), engine.model, cache))
    session.observe(Observation([5]))
    return session, [*prompt, 5]


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


def test_it_covers_what_each_member_covers() -> None:
    members = ("layer_skip:2@widths:2,1", "replay:1.0@chain:3")
    merged, _ = session_of(build_engine("ensemble:" + "+".join(members)))
    united = paths(merged.propose(DraftBudget(64, 8)).tree)
    alone = []
    for member in members:
        drafter, _, shape = member.partition("@")
        session, _ = session_of(build_engine(drafter, shape))
        alone.append(paths(session.propose(DraftBudget(64, 8)).tree))
    assert united == alone[0] | alone[1]
    assert united > alone[0]
    assert united > alone[1]


def test_the_budget_is_shared_equally_and_the_first_member_gets_the_odd_guess() -> None:
    session, _ = session_of(build_engine("ensemble:layer_skip:1@chain:8+replay:1.0@chain:8"))
    for nodes, expected in ((8, (4, 4)), (5, (3, 2)), (1, (1, 0))):
        session.propose(DraftBudget(nodes, 8))
        assert isinstance(session, EnsembleSession)
        assert tuple(tree.drafted for tree in session._trees) == expected


def test_what_a_small_member_cannot_use_goes_to_the_larger_ones() -> None:
    """Without a node limit every member has room for its whole tree."""
    session, _ = session_of(build_engine("ensemble:replay:1.0@chain:2+layer_skip:1@chain:8"))
    session.propose(DraftBudget(10, 10))
    assert isinstance(session, EnsembleSession)
    assert [tree.drafted for tree in session._trees] == [2, 8]


@pytest.mark.parametrize(
    ("budget", "sizes", "expected"),
    [(0, [4, 4], [0, 0]), (1, [4, 4], [1, 0]), (5, [4, 4], [3, 2]), (9, [8, 2, 3], [4, 2, 3]), (99, [8, 2], [8, 2])],
)
def test_shares_of_a_budget(budget: int, sizes: list[int], expected: list[int]) -> None:
    assert equal_shares(budget, sizes) == expected


BEST = "ensemble:(layer_skip:2@best_first:8)+(layer_skip:3@best_first:8)"


def test_a_budget_keeps_the_best_of_the_union() -> None:
    """Every member guesses with the whole budget; the guesses that they find most probable on average stay."""
    session, _ = session_of(build_engine(f"{BEST},budget=8"))
    assert isinstance(session, EnsembleSession)
    tree = session.propose(DraftBudget(64, 8)).tree
    own = session._trees
    assert [len(member) for member in own if member is not None] == [9, 9]
    assert tree.drafted == 8
    union, _ = session_of(build_engine(BEST))
    assert paths(tree) < paths(union.propose(DraftBudget(64, 8)).tree)
    scores = {
        path: sum(
            member.scores[nodes[-1]]
            for member in own
            if member is not None and len(nodes := member.walk(path)) == len(path)
        )
        for path in {path for member in own if member is not None for path in paths(member)}
    }
    kept = paths(tree)
    assert min(scores[path] for path in kept) >= max(score for path, score in scores.items() if path not in kept)


def test_scores_are_means_over_the_members() -> None:
    first, second = TokenTree(7), TokenTree(7)
    first.extend([0, 1], [3, 4])
    first.scores = [1.0, 0.5, 0.4]
    second.extend([0, 0, 2], [5, 3, 6])
    second.scores = [1.0, 0.3, 0.2, 0.1]
    merged = merge(first, second)
    scores = {tuple(merged.path_tokens(node)): score for node, score in enumerate(mean_scores(merged, [first, second]))}
    expected = {(3,): 0.35, (3, 4): 0.2, (5,): 0.15, (3, 6): 0.05}
    assert {path: scores[path] for path in expected} == pytest.approx(expected)
    assert mean_scores(merged, [first, TokenTree(7)])[merged.walk([3])[0]] == 0.25


def test_a_member_hears_how_many_of_its_own_guesses_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = session_of(build_engine(f"{BEST},budget=8"))
    assert isinstance(session, EnsembleSession)
    tree = session.propose(DraftBudget(64, 8)).tree
    path = max((tree.path_tokens(node) for node in range(1, len(tree))), key=len)
    own = [len(member.walk(path)) for member in session._trees if member is not None]
    heard: list[int] = []
    for member in session.members:
        monkeypatch.setattr(member, "observe", lambda observation: heard.append(observation.accepted))
    session.observe(Observation([*path, 1], accepted=len(path)))
    assert heard == own
    assert min(own) < len(path), "one member did not guess the whole path"


def test_a_budget_above_the_members_own_is_theirs() -> None:
    assert build_engine(f"{BEST},budget=100").lane(Regime.GREEDY).drafter.tree_size == 16


def test_a_small_step_keeps_fewer() -> None:
    session, _ = session_of(build_engine(f"{BEST},budget=8"))
    assert session.propose(DraftBudget(3, 8)).tree.drafted == 3
    assert session.propose(DraftBudget(0, 8)).tree.drafted == 0


def test_the_text_is_the_targets_with_a_budget() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = build_engine(f"{BEST},budget=6")
    result = engine.generate(PROMPT, params)
    assert result.tokens == engine.plain().generate(PROMPT, params).tokens
    assert result.stats.num_accepted_tokens > 5
    assert max(record.drafted for record in result.records) == 6


def test_the_description_names_the_members_shapes() -> None:
    described = build_engine("ensemble:ngram@chain:2+layer_skip@widths:2,2").describe()["shape"]
    assert described.startswith("ngram@chain:length=2")
    assert "layer_skip@widths" in described


def test_a_shape_that_no_member_would_use_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=r"--shape best_first.*leave --shape out"):
        build_engine("ensemble:ngram@chain:2+suffix@chain:3", "best_first:9")


def test_union_needs_fewer_steps_than_either_member() -> None:
    """Greedy text, the same guesses for each member as alone: a position is covered when any member covers it."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompt = random_prompts(1, 12, seed=4)[0]

    def steps(drafter: str, shape: str | None = None) -> int:
        return len(build_engine(drafter, shape).generate(prompt, params).records)

    alone = steps("layer_skip:2", "widths:2,1"), steps("ngram", "chain:4")
    assert steps("ensemble:layer_skip:2@widths:2,1+ngram@chain:4") < min(alone)


def two_sampled_members() -> Engine:
    target = ToyModel(2, order=1, sharpness=0.9, seed=10)
    return build_engine(TWO, target=target, tokenizer=letters_tokenizer(2, with_end=False), max_nodes=5)


def test_the_law_of_two_drawing_members_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    assert distance_from_plain(monkeypatch, two_sampled_members(), PROMPT, params)[0] < 1e-12


def test_proposal_kinds() -> None:
    def kind(drafter: str, regime: Regime, proposal: ProposalKind | None = None) -> ProposalKind:
        return plan_parts(EngineConfig(drafter=drafter, proposal=proposal), regime).draft.proposal

    assert kind(TWO, Regime.GREEDY) is ProposalKind.DETERMINISTIC
    assert kind(TWO, Regime.SAMPLED) is ProposalKind.PER_SOURCE
    assert kind(TWO, Regime.SAMPLED, ProposalKind.DETERMINISTIC) is ProposalKind.DETERMINISTIC
    assert kind("ensemble:ngram+replay", Regime.SAMPLED) is ProposalKind.DETERMINISTIC
    for drafter, proposal in ((TWO, ProposalKind.IID), ("ensemble:ngram+replay", ProposalKind.PER_SOURCE)):
        with pytest.raises(IllegalCombinationError, match="leave --proposal out"):
            kind(drafter, Regime.SAMPLED, proposal)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ensemble:ngram", "two members or more"),
        ("ensemble:ngram+lookahead", "cannot be a member"),
        ("ensemble:ngram+(ensemble:ngram+replay)", "cannot be a member"),
        ("ensemble:ngram+", "a member has no name"),
        ("ensemble:ngram@chain:2@chain:3+replay", "DRAFTER@SHAPE"),
        ("ensemble:(ngram+replay", "bracket"),
        ("ensemble:(ngram@chain:4)+(layer_skip:2@best_first:8),budget=8", "shape of member 1 does not tell"),
        ("hybrid:(ngram@best_first:4)+(layer_skip:2@best_first:8),budget=8", "budget"),
    ],
)
def test_refusals(drafter: str, message: str) -> None:
    with pytest.raises((IllegalCombinationError, InvalidOptionError), match=message):
        build_engine(drafter)


def test_each_small_model_member_has_its_own_model() -> None:
    with pytest.raises(InvalidOptionError, match="2 second models"):
        plan_parts(EngineConfig(drafter="ensemble:small_model+small_model", draft_model="one"), Regime.GREEDY)
    with pytest.raises(InvalidOptionError, match="takes no more"):
        plan_parts(EngineConfig(drafter="small_model", draft_model="one,two"), Regime.GREEDY)
    engine = build_engine("ensemble:small_model@chain:2+(small_model@widths:2,1)")
    assert len(engine._lanes[Regime.GREEDY].drafter.parts.members) == 2
    assert engine.generate([3, 4], SamplingParams(max_tokens=12)).tokens == (
        engine.plain().generate([3, 4], SamplingParams(max_tokens=12)).tokens
    )


def test_brackets_protect_commas_and_equals_signs() -> None:
    plan = plan_parts(EngineConfig(drafter="ensemble:(ngram:max_match=3,branches=2@chain:6)+replay:0.5"), Regime.GREEDY)
    first, second = plan.draft.members
    assert first.drafter.options.max_match == 3
    assert first.drafter.options.branches == 2
    assert first.shape.options.length == 6
    assert second.drafter.options.rate == 0.5
