"""SuffixDecoding: which context it chooses, its scores and limits, sessions, and the tree of earlier outputs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.tiny_engines import build_engine, random_prompts
from outrider.drafters.base import DraftBudget, DraftContext, DraftParts, Observation
from outrider.drafters.suffix import Suffix, SuffixOptions, SuffixSession
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import Shape
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree

MODEL = ToyModel(100)
BUDGET = DraftBudget(64, 64)
CHAIN = Chain(ChainOptions(length=8))


def drafter(shape: Shape = CHAIN, **options: object) -> Suffix:
    return Suffix(SuffixOptions.model_validate(options), shape, DraftParts(MODEL))


def context(prompt: list[int]) -> DraftContext:
    pipeline = LogitsPipeline(SamplingParams(), 100)
    return DraftContext(prompt, pipeline, SeededStream(0), MODEL, MODEL.new_cache())


def started(prompt: list[int], shape: Shape = CHAIN, **options: object) -> SuffixSession:
    session = drafter(shape, **options).new_session()
    session.begin(context(prompt))
    return session


def guesses(session: SuffixSession, budget: DraftBudget = BUDGET) -> list[int]:
    return session.propose(budget).tree.tokens[1:]


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


def test_copies_what_followed_in_proportion_to_the_match() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert guesses(started(prompt)) == [3, 4, 5, 6]
    assert guesses(started(prompt, factor=1.0)) == [3, 4]
    assert guesses(started(prompt, factor=64.0)) == [3, 4, 5, 6, 7, 8, 9, 1]
    assert set(started(prompt).propose(BUDGET).tree.sources[1:]) == {"suffix"}


def test_the_context_that_promises_more_wins() -> None:
    # After 5, 6 comes 50 once, which promises 4 * 1/2; after 6 comes 60 five times of six, which promises 4 * 5/7.
    prompt = [5, 6, 50, 51, 52, 53, *[6, 60, 61, 62, 63] * 5, 9, 5, 6]
    assert guesses(started(prompt, factor=4.0), DraftBudget(4, 64)) == [60, 61, 62, 63]
    assert guesses(started(prompt, factor=4.0, min_match=2), DraftBudget(4, 64)) == [50, 51, 52, 53]
    # With one guess a matched token the short context may make one only: 5/7 against 2 * 1/2.
    assert guesses(started(prompt, factor=1.0), DraftBudget(4, 64)) == [50, 51]


def test_the_longer_context_wins_a_tie() -> None:
    # 1/2 after 2, 3 and 2/4 after 3.
    prompt = [2, 3, 50, 9, 3, 60, 8, 3, 60, 7, 2, 3]
    assert guesses(started(prompt), DraftBudget(1, 64)) == [50]


def test_a_context_near_the_depth_leaves_room_for_guesses() -> None:
    """The longest context could be continued by one token only; a shorter one at the same places gives them all."""
    assert guesses(started(list(range(40)) * 3, max_depth=32)) == list(range(8))


def test_no_match_no_guess() -> None:
    assert guesses(started([1, 2, 3, 4])) == []
    assert guesses(started([5])) == []
    assert guesses(started([1, 7, 2, 1], min_match=2)) == []
    assert guesses(started([1, 7, 2, 1])) == [7, 2]


def test_unlikely_paths_are_not_guessed() -> None:
    prompt = [1, 10, 1, 11, 1, 12, 1, 13, 1]
    shape = Widths(WidthsOptions(widths=(8,)))
    assert paths(started(prompt, shape, min_probability=0.1).propose(BUDGET).tree) == {(10,), (11,), (12,), (13,)}
    assert guesses(started(prompt, shape, min_probability=0.21)) == []


def test_different_continuations_become_branches_with_shares_as_scores() -> None:
    class Recorder(Widths):
        def grow(self, root_token, source, limits):  # type: ignore[no-untyped-def]
            (candidates,) = source.candidates(TokenTree(root_token), [0])
            assert list(candidates.tokens) == [10, 20]
            # Three occurrences and the text's end, whose continuation is unknown.
            assert list(candidates.scores) == [2 / 4, 1 / 4]
            return super().grow(root_token, source, limits)

    prompt = [1, 2, 10, 11, 5, 1, 2, 20, 21, 6, 1, 2, 10, 12, 7, 1, 2]
    tree = started(prompt, Recorder(WidthsOptions(widths=(3, 2)))).propose(BUDGET).tree
    assert paths(tree) == {(10,), (20,), (10, 12), (10, 11), (20, 21)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 3), st.sampled_from([4, 64]))
def test_guesses_occur_in_the_text_and_scores_are_ranked(text: list[int], min_match: int, max_depth: int) -> None:
    class Recorder(Widths):
        def grow(self, root_token, source, limits):  # type: ignore[no-untyped-def]
            inner = source.candidates

            def recorded(tree: TokenTree, nodes):  # type: ignore[no-untyped-def]
                found = inner(tree, nodes)
                for candidates in found:
                    scores = list(candidates.scores)
                    assert scores == sorted(scores, reverse=True)
                    assert all(0.0 < score <= 1.0 for score in scores)
                    assert sum(scores) <= 1.0 + 1e-12
                    assert len(set(candidates.tokens)) == len(candidates.tokens) == len(scores)
                return found

            source.candidates = recorded
            return super().grow(root_token, source, limits)

    shape = Recorder(WidthsOptions(widths=(3, 2, 2, 1)))
    tree = started(text, shape, min_match=min_match, max_depth=max_depth).propose(BUDGET).tree
    joined = " ".join(map(str, text)) + " "
    for path in paths(tree):
        # Every branch is what followed some end of the text.
        assert any(
            " ".join(map(str, [*text[-length:], *path])) + " " in joined
            for length in range(min_match, min(max_depth, len(text) + 1))
        )


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
@pytest.mark.parametrize("more", [[], [9, 1, 2], [1, 2]])
def test_a_session_begun_again_on_a_truncated_or_edited_text_equals_a_fresh_one(cut: int, more: list[int]) -> None:
    """U65: whatever is cut off the history, and whatever replaces it."""
    used = started([1, 2, 3, 1, 2], capacity=256)
    used.observe(Observation([9, 1]))
    used.propose(BUDGET)
    used.observe(Observation([2, 3]))
    second = [1, 2, 3, 1, 2, 9, 1, 2, 3][: 9 - cut] + more
    used.end()
    used.begin(context(second))
    fresh = started(second, capacity=256)
    assert guesses(used) == guesses(fresh)
    assert used.own.text == fresh.own.text == second
    assert (used.own.size, used.own.nodes) == (fresh.own.size, fresh.own.nodes)


def test_long_texts_stay_within_the_capacity() -> None:
    session = started(list(range(90)) * 10, capacity=256)
    session.observe(Observation(list(range(90)) * 5))
    assert session.own.size == 256
    assert session.own.nodes <= 2 * 256 + 64
    assert guesses(session) == list(range(8))


def test_the_budget_limits_the_tree() -> None:
    session = started([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert guesses(session, DraftBudget(2, 64)) == [3, 4]
    assert guesses(session, DraftBudget(64, 1)) == [3]
    assert guesses(session, DraftBudget(0, 64)) == []


# -- earlier outputs ---------------------------------------------------------------------------------------------


def test_an_output_is_shared_when_its_request_ends_and_once() -> None:
    both = drafter(shared=True)
    assert both.earlier is not None
    first, second = both.new_session(), both.new_session()
    first.begin(context([1, 2]))
    first.observe(Observation([30, 31, 32, 33]))
    second.begin(context([7, 30, 31]))
    assert guesses(second) == []
    first.end()
    first.end()
    assert both.earlier.size == 4
    assert guesses(second) == [32, 33]
    # A cancelled request's kept text is the target's own too; one that kept nothing adds nothing.
    second.end()
    assert both.earlier.size == 4


def test_begin_without_end_shares_the_output_too() -> None:
    both = drafter(shared=True)
    session = both.new_session()
    session.begin(context([1]))
    session.observe(Observation([40, 41, 42]))
    session.begin(context([40]))
    assert guesses(session) == [41, 42]


def test_own_text_wins_ties_over_earlier_outputs() -> None:
    both = drafter(shared=True)
    assert both.earlier is not None
    both.earlier.add([1, 2, 50, 51, 52, 53])
    session = both.new_session()
    session.begin(context([1, 2, 60, 61, 62, 63, 9, 1, 2]))
    assert guesses(session)[0] == 60
    both.earlier.add([1, 2, 50, 51, 52, 53])
    assert guesses(session)[0] == 50


def test_old_outputs_leave_whole() -> None:
    both = drafter(shared=True, capacity=256)
    assert both.earlier is not None
    for request in range(5):
        session = both.new_session()
        session.begin(context([99]))
        session.observe(Observation([20 * request % 90 + index % 20 for index in range(100)]))
        session.end()
    assert both.earlier.size == 200
    assert both.earlier.find([0, 1]) is None
    assert both.earlier.find([80, 81]) is not None


def test_nothing_is_shared_unless_asked_for() -> None:
    assert drafter().earlier is None


def test_greedy_output_is_plain_with_earlier_outputs() -> None:
    """Invariant 1: guesses from other requests change the number of steps, never the text."""
    engine, plain = build_engine("suffix:shared=true,min_match=1", "widths:2,2,1"), build_engine("none")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for _ in range(2):
        for prompt in random_prompts(5, 12):
            assert engine.generate(prompt, params).tokens == plain.generate(prompt, params).tokens
    again = engine.generate(random_prompts(5, 12)[0], params)
    assert again.stats.num_accepted_tokens > 8


@pytest.mark.parametrize(
    "options",
    [{"min_match": 0}, {"max_depth": 1}, {"factor": 0}, {"min_probability": 2}, {"capacity": 8}, {"global": True},
     {"min_match": 8, "max_depth": 8}],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SuffixOptions.model_validate(options)
