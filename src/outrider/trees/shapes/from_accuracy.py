"""A static tree from how often each head is right: Medusa's construction (Cai et al. 2024, arXiv 2401.10774).

The guess of rank r of head d is right with probability a[d][r]; taking heads as independent, a path is right with the
product along it, and a tree's expected accepted guesses are the sum over its paths. Starting from the root, the best
neighbour (a node's next sibling or its first child) is added until the budget is spent. Knows no head and no text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outrider.trees.shapes.structure import RankPath, path_text


def paths_from_accuracy(accuracy: Sequence[Sequence[float]], budget: int) -> list[RankPath]:
    """Paths of the tree of at most ``budget`` guesses, in the order in which they were added.

    Args:
        accuracy: [heads][ranks], each in [0, 1]: share of positions at which the head's guess of that rank was right.
        budget: nodes besides the root.

    Returns:
        Fewer paths where everything else is never right.

    Raises:
        ValueError: for a share outside [0, 1].
    """
    if not all(0.0 <= share <= 1.0 for head in accuracy for share in head):
        raise ValueError("accuracies are shares between 0 and 1")
    chosen: list[RankPath] = []
    waiting: list[tuple[float, RankPath]] = []

    def offer(path: RankPath, above: float) -> None:
        """``above``: the product over the path without its last rank."""
        head, rank = len(path) - 1, path[-1]
        if head < len(accuracy) and rank < len(accuracy[head]) and accuracy[head][rank] > 0.0:
            heapq.heappush(waiting, (-above * accuracy[head][rank], path))

    offer((0,), 1.0)
    while waiting and len(chosen) < budget:
        value, path = heapq.heappop(waiting)
        chosen.append(path)
        offer((*path, 0), -value)
        offer((*path[:-1], path[-1] + 1), _product(accuracy, path[:-1]))
    return chosen


def expected_tokens(accuracy: Sequence[Sequence[float]], paths: Sequence[RankPath]) -> float:
    """Tokens of a step, the bonus token included, if heads were independent."""
    return 1.0 + sum(_product(accuracy, path) for path in paths)


def paths_text(paths: Sequence[RankPath]) -> str:
    """What ``--shape static:`` takes: 0/0.0/1."""
    return "/".join(map(path_text, paths))


def _product(accuracy: Sequence[Sequence[float]], path: RankPath) -> float:
    product = 1.0
    for head, rank in enumerate(path):
        product *= accuracy[head][rank]
    return product
