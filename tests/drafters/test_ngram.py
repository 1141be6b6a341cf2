"""Prompt lookup against a slow search, and its sessions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outrider.drafters.base import DraftBudget, DraftContext, DraftParts, DraftSession, Observation
from outrider.drafters.ngram import NGram, NGramIndex, NGramOptions
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import Shape
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind

MODEL = ToyModel(100)
BUDGET = DraftBudget(64, 64)


def started(prompt: list[int], shape: Shape | None = None, **options: int) -> DraftSession:
    session = NGram(NGramOptions(**options), shape or Chain(ChainOptions()), DraftParts(MODEL)).new_session()
    session.begin(context(prompt))
    return session


def context(prompt: list[int]) -> DraftContext:
    pipeline = LogitsPipeline(SamplingParams(), 100)
    return DraftContext(prompt, pipeline, SeededStream(0), MODEL, MODEL.new_cache())


def guesses(session: DraftSession, budget: DraftBudget = BUDGET) -> list[int]:
    return session.propose(budget).tree.tokens[1:]


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


def test_copies_what_followed() -> None:
    session = started([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], Chain(ChainOptions(length=4)))
    tree = session.propose(BUDGET).tree
    assert tree.tokens == [2, 3, 4, 5, 6]
    assert tree.kind is ProposalKind.DETERMINISTIC
    assert set(tree.sources[1:]) == {"ngram"}


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    prompt = [1, 2, 3, 50, 9, 9, 2, 3, 60, 9, 1, 2, 3]
    assert guesses(started(prompt))[0] == 50
    assert guesses(started(prompt, max_match=2))[0] == 60


def test_the_count_wins_over_recency_and_recency_over_age() -> None:
    assert guesses(started([1, 2, 50, 1, 2, 50, 1, 2, 60, 1, 2], max_match=2))[0] == 50
    assert guesses(started([1, 2, 50, 1, 2, 60, 1, 2], max_match=2))[0] == 60


def test_no_match_no_guess() -> None:
    assert guesses(started([1, 2, 3, 4])) == []
    assert guesses(started([5])) == []
    # A match of one token counts only when asked for.
    assert guesses(started([1, 7, 2, 1])) == []
    assert guesses(started([1, 7, 2, 1], Chain(ChainOptions(length=2)), min_match=1)) == [7, 2]


def test_the_end_of_the_text_does_not_match_itself() -> None:
    assert guesses(started([8, 1, 2, 3])) == []


def test_a_loop_is_guessed_beyond_the_end_of_the_text() -> None:
    assert guesses(started([9, 1, 2, 3, 1, 2, 3, 1, 2])) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert guesses(started([4, 7, 7, 7])) == [7] * 8


def test_different_continuations_become_branches() -> None:
    prompt = [1, 2, 10, 11, 5, 1, 2, 20, 21, 6, 1, 2, 10, 12, 7, 1, 2]
    session = started(prompt, Widths(WidthsOptions(widths=(3, 2))), max_match=2)
    assert paths(session.propose(BUDGET).tree) == {(10,), (20,), (10, 12), (10, 11), (20, 21)}
    session = started(prompt, Widths(WidthsOptions(widths=(3, 2))), max_match=2, branches=1)
    assert paths(session.propose(BUDGET).tree) == {(10,), (10, 12)}


def test_scores_grow_with_match_length_and_agreement() -> None:
    def lengths(prompt: list[int], stop: float) -> int:
        return len(guesses(started(prompt, Chain(ChainOptions(length=1, stop=stop)))))

    long_match, short_match = [1, 2, 3, 4, 9, 1, 2, 3, 4], [1, 2, 9, 5, 1, 2]
    assert lengths(long_match, 0.9) == 1
    assert lengths(short_match, 0.9) == 0
    assert lengths(short_match, 0.7) == 1
    divided = [1, 2, 9, 5, 1, 2, 8, 6, 1, 2]
    assert lengths(divided, 0.7) == 0
    assert lengths(divided, 0.3) == 1


def test_observed_tokens_join_the_text() -> None:
    session = started([1, 2, 3])
    assert guesses(session) == []
    session.observe(Observation([7, 1]))
    session.observe(Observation([2]))
    tree = session.propose(DraftBudget(3, 3)).tree
    assert tree.tokens == [2, 3, 7, 1]


def test_the_budget_limits_the_tree() -> None:
    session = started([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2])
    assert guesses(session, DraftBudget(2, 64)) == [3, 4]
    assert guesses(session, DraftBudget(64, 1)) == [3]
    assert guesses(session, DraftBudget(0, 64)) == []


@pytest.mark.parametrize("second", [[1, 2, 3, 1, 2, 9, 1, 2], [4, 5, 6, 4, 5], [1, 2]])
def test_a_session_begun_again_equals_a_fresh_one(second: list[int]) -> None:
    used = started([1, 2, 3, 1, 2])
    used.observe(Observation([9, 1]))
    used.end()
    used.begin(context(second))
    assert guesses(used) == guesses(started(second))


def test_propose_before_begin_is_an_error() -> None:
    with pytest.raises(ValueError, match="call begin first"):
        NGram(NGramOptions(), Chain(ChainOptions()), DraftParts(MODEL)).new_session().propose(BUDGET)


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def slow_occurrences(text: list[int], min_match: int, max_match: int) -> dict[int, int]:
    """Every earlier place with its longest match to the text's end."""
    found = {}
    for length in range(max_match, min_match - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if length <= len(text) and text[end - length : end] == text[-length:]:
                found.setdefault(end, length)
    return found


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 40), st.integers(1, 3), st.integers(0, 2))
def test_the_index_finds_what_a_slow_search_finds(text: list[int], cut: int, min_match: int, more: int) -> None:
    index = NGramIndex(min_match, min_match + more)
    index.extend(text[:cut])
    index.extend(text[cut:])
    found = index.occurrences()
    slow = slow_occurrences(text, min_match, min_match + more)
    # Only the latest 16 places of each match length are looked at.
    assert set(found) <= set(slow.items())
    assert len(found) == len(slow) or len(found) >= 16
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_every_branch_is_a_continuation_in_the_text(text: list[int]) -> None:
    tree = started(text, Widths(WidthsOptions(widths=(3, 3, 2, 1)))).propose(BUDGET).tree
    ends = slow_occurrences(text, 2, 4)
    # A branch copies from one place; past the end of the text it goes on copying from itself.
    for node in range(1, len(tree)):
        path = tree.path_tokens(node)
        longer = text + path
        assert any(longer[end : end + len(path)] == path for end in ends)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_scores_are_ranked_probabilities(text: list[int]) -> None:
    class Recorder(Widths):
        def grow(self, root_token, source, limits):  # type: ignore[no-untyped-def]
            (candidates,) = source.candidates(TokenTree(root_token), [0])
            scores = list(candidates.scores)
            assert scores == sorted(scores, reverse=True)
            assert all(0.0 < score < 1.0 for score in scores)
            assert sum(scores) <= 1.0
            assert len(set(candidates.tokens)) == len(candidates.tokens) == len(scores)
            return super().grow(root_token, source, limits)

    started(text, Recorder(WidthsOptions(widths=(2,))), min_match=1).propose(BUDGET)


def test_the_index_grows_by_a_constant_per_token() -> None:
    index = NGramIndex(2, 4)
    index.extend(torch.randint(0, 3, (3000,), generator=torch.Generator().manual_seed(0)).tolist())
    assert sum(len(ends) for ends in index._follows.values()) <= 3 * 3000


@pytest.mark.parametrize("options", [{"min_match": 5}, {"max_match": 0}, {"branches": 0}, {"max_mach": 3}])
def test_wrong_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        NGramOptions.model_validate(options)
