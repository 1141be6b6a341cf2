"""Exact enumeration of the output law of code that draws from a ``RandomStream``.

``outcomes(step)`` runs ``step`` once for every sequence of random outcomes, depth first: each run replays a prefix of
choices and takes the first untried one after it. Outcomes of probability 0 are skipped, so code that does not need a
draw (temperature 0) costs no branch. Knows nothing of what ``step`` does, only that it is a function of its draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from torch import Tensor

from outrider.sampling.draw import Role

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class EnumeratingStream:
    """A ``RandomStream`` that follows a plan of choices and records what else could have been chosen.

    ``keys`` are those of the draws that branched; a key used twice in one run is an error, because a counter-based
    stream would give both draws the same outcome.
    """

    def __init__(self) -> None:
        self._plan: list[int] = []
        self._widths: list[int] = []
        self.probability = 1.0
        self.keys: set[tuple[int, Role, int]] = set()

    def bernoulli(self, probability: float, position: int, role: Role, draw: int) -> bool:
        probability = min(1.0, max(0.0, probability))
        return bool(self._choose([(0, 1.0 - probability), (1, probability)], (position, role, draw)))

    def categorical(self, probabilities: Tensor, position: int, role: Role, draw: int) -> int:
        weights = probabilities.tolist()
        total = sum(weights)
        return self._choose([(i, weight / total) for i, weight in enumerate(weights)], (position, role, draw))

    def _choose(self, options: list[tuple[int, float]], key: tuple[int, Role, int]) -> int:
        options = [option for option in options if option[1] > 0.0]
        if len(options) == 1:
            return options[0][0]
        if key in self.keys:
            raise ValueError(f"key {key} was drawn from twice")
        self.keys.add(key)
        level = len(self._widths)
        if level == len(self._plan):
            self._plan.append(0)
        self._widths.append(len(options))
        outcome, probability = options[self._plan[level]]
        self.probability *= probability
        return outcome

    def advance(self) -> bool:
        """Plan the next run; false when every outcome has been seen."""
        while self._plan and self._plan[-1] + 1 == self._widths[len(self._plan) - 1]:
            self._plan.pop()
        if not self._plan:
            return False
        self._plan[-1] += 1
        self._widths.clear()
        self.keys.clear()
        self.probability = 1.0
        return True


def outcomes(step: Callable[[EnumeratingStream], T]) -> Iterator[tuple[T, float]]:
    """Every result of ``step`` with the probability of the draws that led to it; results may repeat."""
    stream = EnumeratingStream()
    while True:
        result = step(stream)
        yield result, stream.probability
        if not stream.advance():
            return


def output_law(step: Callable[[EnumeratingStream], H]) -> dict[H, float]:
    """Result -> probability."""
    law: dict[H, float] = defaultdict(float)
    for result, probability in outcomes(step):
        law[result] += probability
    return dict(law)
