"""Medusa's greedy construction: as good as any tree of its size, and always a tree."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from outrider.trees.shapes.from_accuracy import expected_tokens, paths_from_accuracy, paths_text
from outrider.trees.shapes.static import StaticOptions

ACCURACY = [[0.6, 0.15, 0.05], [0.45, 0.2, 0.1], [0.3, 0.1, 0.02]]


def all_paths(accuracy: list[list[float]]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for depth in range(1, len(accuracy) + 1):
        found += product(*(range(len(head)) for head in accuracy[:depth]))
    return found


def is_tree(paths: set[tuple[int, ...]]) -> bool:
    return all(path[:-1] in paths or len(path) == 1 for path in paths)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_no_tree_of_the_size_is_better(budget: int) -> None:
    accuracy = [head[:2] for head in ACCURACY[:2]]
    trees = (tree for tree in combinations(all_paths(accuracy), budget) if is_tree(set(tree)))
    best = max(expected_tokens(accuracy, tree) for tree in trees)
    assert expected_tokens(accuracy, paths_from_accuracy(accuracy, budget)) == pytest.approx(best)


@pytest.mark.parametrize("budget", [1, 7, 16, 39])
def test_the_best_products_are_chosen(budget: int) -> None:
    """Products fall along siblings and children, so the best tree is simply the best paths."""
    values = sorted((expected_tokens(ACCURACY, [path]) - 1.0 for path in all_paths(ACCURACY)), reverse=True)
    chosen = paths_from_accuracy(ACCURACY, budget)
    assert len(chosen) == len(set(chosen)) == budget
    assert expected_tokens(ACCURACY, chosen) == pytest.approx(1.0 + sum(values[:budget]))


def test_first_paths() -> None:
    assert paths_from_accuracy(ACCURACY, 4) == [(0,), (0, 0), (1,), (0, 1)]


def test_noise_in_the_measurement_leaves_a_tree() -> None:
    """A later rank measured above an earlier one is not jumped to: children stay in the head's own order."""
    chosen = paths_from_accuracy([[0.5, 0.01, 0.3], [0.1, 0.6]], 6)
    assert is_tree(set(chosen))
    assert all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in chosen for path in chosen)


@pytest.mark.parametrize(
    ("accuracy", "size"), [([[0.5, 0.0, 0.2]], 1), ([[0.0]], 0), ([], 0), ([[0.9], [0.0, 0.9]], 1)]
)
def test_what_is_never_right_gets_no_place(accuracy: list[list[float]], size: int) -> None:
    assert len(paths_from_accuracy(accuracy, 10)) == size


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_are_shares(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        paths_from_accuracy([[share]], 3)


def test_the_static_shape_takes_the_text() -> None:
    chosen = paths_from_accuracy(ACCURACY, 12)
    options = StaticOptions.model_validate({"paths": paths_text(chosen)})
    assert set(options.structure.paths()) == set(chosen)
