"""Lookahead: the window's geometry, what enters the pool, and that guesses come true."""

from __future__ import annotations

import numpy as np
import pytest

from engine.tiny_engines import build_engine, random_prompts
from outrider.drafters.lookahead import LookaheadSession, NGramPool, Window
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams

PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


def test_pool_keeps_the_latest_per_key() -> None:
    pool = NGramPool(2)
    for rest in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(7, rest)
    assert pool.after(7) == [(5, 6), (1, 2)]
    assert pool.after(8) == []


def test_pool_is_bounded() -> None:
    pool = NGramPool(3)
    for key in range(10_000):
        pool.add(key, (key, key))
    assert len(pool._entries) == 4096
    assert pool.after(0) == []
    assert pool.after(9_999) == [(9_999, 9_999)]


def test_every_window_row_sees_one_token_at_each_position_up_to_its_own() -> None:
    window = Window(4, 3)
    window.levels = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    mask, depths = window.mask(), np.array(window.depths())
    for row in range(12):
        assert sorted(depths[mask[row]]) == list(range(1, depths[row] + 1))
        assert mask[row, row]


def test_columns_become_ngrams_and_move_on_with_the_text() -> None:
    window = Window(3, 2)
    window.levels = [[10, 11, 12]]
    assert window.advance(1, [20, 21, 22]) == []  # not full yet: nothing is dropped, every column moves by one token
    assert window.levels == [[11, 12, 11], [21, 22, 21]]
    finished = window.advance(2, [30, 31, 32])
    assert finished == [(11, (21, 30)), (12, (22, 31)), (11, (21, 32))]
    # Level 0 is gone, so columns start one position later by themselves; the second token moves them once more.
    assert window.levels == [[22, 21, 22], [31, 32, 31]]


def test_a_window_that_was_not_evaluated_only_moves() -> None:
    window = Window(3, 2)
    window.levels = [[10, 11, 12], [20, 21, 22]]
    assert window.advance(5, None) == []
    assert window.levels == [[12, 12, 12], [22, 22, 22]]


def test_the_pool_holds_the_targets_own_continuations() -> None:
    """On a Markov chain a column's tokens after its first are greedy successors of it, so the n-grams must be too."""
    target = ToyModel(vocab_size=12, order=1, seed=5)
    engine = build_engine("lookahead:window=4,ngram=3,from_prompt=false", "chain:2", target=target)
    session = engine.new_session()
    engine.generate([3, 4, 5], PARAMS, session)
    (draft,) = session.drafts.values()
    assert isinstance(draft, LookaheadSession)
    best = [int(target.logits_after([token]).argmax()) for token in range(12)]
    found = [(first, rest) for first in range(12) for rest in draft.pool.after(first)]
    assert found
    # A level's refilled last columns follow another column's first token, so the first step may differ; later ones not.
    assert sum(rest[0] == best[first] for first, rest in found) >= len(found) // 2
    assert all(rest[1] == best[rest[0]] for _, rest in found)


@pytest.mark.parametrize("shape", ["best_first:15", "widths:3,1,1", "chain:3"])
def test_guesses_are_accepted_and_the_text_is_unchanged(shape: str) -> None:
    for prompt in random_prompts(3, 12, seed=8):
        result = build_engine("lookahead", shape).generate(prompt, PARAMS)
        assert result.tokens == build_engine("none").generate(prompt, PARAMS).tokens
        assert result.stats.mean_acceptance_length > 1.5


def test_near_the_context_limit_the_window_stays_at_home() -> None:
    target = ToyModel(vocab_size=12, order=2, seed=3, context_length=24)
    result = build_engine("lookahead", "chain:3", target=target).generate([3, 4, 5, 6], PARAMS)
    assert len(result.tokens) == 20
    assert result.tokens == build_engine("none", target=target).generate([3, 4, 5, 6], PARAMS).tokens


def test_the_window_does_not_ride_along_when_nothing_is_drafted() -> None:
    rows: list[int] = []
    engine = build_engine("lookahead", "chain:3", max_nodes=0)
    original = engine.model.forward

    def counting(segments, *rest):  # type: ignore[no-untyped-def]
        rows.extend(len(segment.tokens) for segment in segments)
        return original(segments, *rest)

    engine.model.forward = counting  # type: ignore[method-assign]
    engine.generate([3, 4, 5], SamplingParams(max_tokens=5, ignore_eos=True))
    assert rows == [3, 1, 1, 1, 1]
