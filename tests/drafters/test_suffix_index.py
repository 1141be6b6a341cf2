"""The suffix tree against counting by hand: growing, forgetting, finished texts, bounds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.suffix_index import Ends, Node, Point, SuffixTree, expected_length, follow

tokens = st.lists(st.integers(0, 2), max_size=40)
depths = st.integers(1, 6)


def counted(tree: SuffixTree) -> Counter[tuple[int, ...]]:
    """Occurrences of every string in the tree, read as a drafter reads it."""
    found: Counter[tuple[int, ...]] = Counter()
    ends = tree.ends()
    waiting: list[tuple[tuple[int, ...], Point]] = [((), Point(tree.root, 0, 0))]
    while waiting:
        above, point = waiting.pop()
        for token, below in follow(point, ends):
            found[(*above, token)] = below.occurrences
            waiting.append(((*above, token), below))
    return found


def by_hand(texts: list[list[int]], depth: int, first: int = 0) -> Counter[tuple[int, ...]]:
    """Occurrences of every string of up to ``depth`` tokens that begins at ``first`` or later."""
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for start in range(first, len(text))
        for length in range(1, min(depth, len(text) - start) + 1)
    )


def every_node(tree: SuffixTree) -> list[Node]:
    found, waiting = [], [tree.root]
    while waiting:
        below = list((waiting.pop().children or {}).values())
        found += below
        waiting += below
    return found


def check_structure(tree: SuffixTree) -> None:
    """Children's counts, the way up, the node count and its bound."""
    nodes = every_node(tree)
    assert tree.nodes == len(nodes) <= 2 * tree.size + tree.depth
    for node in [tree.root, *nodes]:
        below = list((node.children or {}).values())
        assert all(child.parent is node for child in below)
        assert all(child.count >= 1 for child in below)
        assert node is tree.root or sum(child.count for child in below) <= node.count


@settings(max_examples=300, deadline=None)
@given(tokens, depths, st.integers(0, 20))
def test_counts_of_a_growing_text_that_forgets_its_beginning(text: list[int], depth: int, more: int) -> None:
    tree = SuffixTree(depth, depth + more)
    for length in range(1, len(text) + 1):
        tree.extend(text[length - 1 : length])
        assert tree.text == text[:length]
        assert tree.size == min(length, tree.capacity)
        assert counted(tree) == by_hand([text[:length]], depth, length - tree.size)
        check_structure(tree)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8), depths, st.integers(0, 20))
def test_counts_of_finished_texts_of_which_the_oldest_leave(texts: list[list[int]], depth: int, more: int) -> None:
    tree, kept = SuffixTree(depth, depth + more), []
    for text in texts:
        tree.add(text)
        kept.append(text[-tree.capacity :])
        while sum(map(len, kept)) > tree.capacity:
            kept.pop(0)
        expected = by_hand(kept, depth)
        assert counted(tree) == expected
        check_structure(tree)
        for string in [*expected, (0,) * depth, (1, 2)]:
            point = tree.find(list(string))
            assert (0 if point is None else point.occurrences) == expected[string]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6), depths)
def test_nothing_refers_to_a_forgotten_text(texts: list[list[int]], depth: int) -> None:
    """Else memory would grow with every request that ever was."""
    tree = SuffixTree(depth, depth + 12)
    for text in texts:
        tree.add(text)
        alive = {id(kept) for kept in tree._finished}
        assert {id(node.text) for node in every_node(tree)} <= alive


@settings(max_examples=200, deadline=None)
@given(tokens, st.integers(2, 6), st.integers(0, 20))
def test_matches_are_the_ends_that_repeat_something(text: list[int], depth: int, more: int) -> None:
    tree = SuffixTree(depth, depth + more)
    tree.extend(text)
    counts = by_hand([text], depth, len(text) - tree.size)
    ends = tree.ends()
    found = dict(tree.matches())
    assert list(found) == sorted(found, reverse=True)
    for length in range(1, depth):
        context = tuple(text[-length:])
        if length > tree.size:
            break
        followed = {token: counts[(*context, token)] for token in range(3) if counts[(*context, token)]}
        if length in found:
            point = found[length]
            assert point.occurrences == counts[context]
            assert {token: below.occurrences for token, below in follow(point, ends)} == followed
        else:
            assert followed == {}


@settings(max_examples=100, deadline=None)
@given(tokens, st.integers(1, 8), st.floats(0.0, 1.0))
def test_expected_length_is_the_sum_along_the_best_chain(text: list[int], most: int, least: float) -> None:
    tree = SuffixTree(6, 100)
    tree.extend(text)
    ends: Ends = tree.ends()
    for _, point in tree.matches():
        total, here = 0.0, point
        for _ in range(most):
            ranked = follow(here, ends)
            if not ranked or ranked[0][1].occurrences < least * point.occurrences:
                break
            here = ranked[0][1]
            total += here.occurrences / point.occurrences
        assert expected_length(point, ends, most, least) == pytest.approx(total)


def test_more_frequent_comes_first_then_more_recent() -> None:
    tree = SuffixTree(4, 100)
    tree.extend([1, 50, 1, 60, 1, 60, 1, 70, 1])
    point = dict(tree.matches())[1]
    assert [token for token, _ in follow(point, tree.ends())] == [60, 70, 50]


TEXTS = {
    "random": [random.Random(0).randrange(50_000) for _ in range(100_000)],
    "few tokens": [random.Random(1).randrange(3) for _ in range(100_000)],
    "periodic": [index % 37 for index in range(100_000)],
    "one token": [7] * 100_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_memory_is_bounded_for_long_texts(name: str) -> None:
    tree = SuffixTree(16, 4096)
    tree.extend(TEXTS[name])
    assert tree.size == 4096
    check_structure(tree)
    assert tree.nodes <= 2 * 4096 + 16
    assert counted(tree) == by_hand([TEXTS[name]], 16, 100_000 - 4096)


def test_a_repeated_text_costs_no_nodes_a_copy() -> None:
    text = TEXTS["random"][:1000]
    once, often = SuffixTree(64, 32_768), SuffixTree(64, 32_768)
    once.extend(text)
    often.extend(text * 20)
    assert often.nodes <= 2 * once.nodes + 64


def test_open_and_finished_texts_do_not_mix() -> None:
    tree = SuffixTree(4, 10)
    tree.extend([1, 2])
    with pytest.raises(ValueError, match="open text"):
        tree.add([3])
    with pytest.raises(ValueError, match="capacity"):
        SuffixTree(8, 4)
