"""A machine on paper for the controller: what a step of each tree size costs and how many tokens it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.schedules.controller import Controller

PLAIN_SECONDS = 0.012
COSTS = {0: PLAIN_SECONDS, 3: 0.014, 8: 0.025}
"""Seconds by chain length: a short tree is nearly free, a long one costs twice a plain step."""


@dataclass
class Machine:
    """Chains with a chance of acceptance per guess; ``finds`` is how often the drafter has a guess at all."""

    acceptance: Callable[[int], float]
    costs: dict[int, float] = field(default_factory=lambda: dict(COSTS))
    noise: float = 0.1
    finds: float = 1.0
    seed: int = 0
    chosen: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def run(self, controller: Controller, steps: int) -> None:
        """Let ``controller`` decode ``steps`` steps."""
        draws = random.Random(self.seed)
        for step in range(steps):
            budget = controller.choose()
            size = budget if draws.random() < self.finds else 0
            kept = 0
            while kept < size and draws.random() < self.acceptance(step):
                kept += 1
            seconds = self.costs[size] * draws.gauss(1.0, self.noise)
            controller.record(size, kept + 1, seconds)
            self.chosen.append(budget)
            self.tokens += kept + 1
            self.seconds += seconds

    @property
    def loss(self) -> float:
        """How much longer than plain decoding of as many tokens, as a share (negative: a gain)."""
        return self.seconds / (self.tokens * self.costs[0]) - 1.0


def expected_rate(size: int, acceptance: float, costs: dict[int, float] | None = None) -> float:
    """Tokens per second of always using chains of ``size``."""
    return sum(acceptance**i for i in range(size + 1)) / (costs or COSTS)[size]
