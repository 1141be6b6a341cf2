"""Turns speculation up, down and off by what it measures, so that it is never a loss that nobody sees.

Three levels: plain decoding, a short tree, the full budget. Each keeps the tokens per second of its latest steps, and
the best one is used. The other ones are tried again now and then under a budget: a level that was tried in vain owes
the seconds that it lost against the best one, and waits until ``_SHARE`` of the time that passes has paid them back. So
a tree that costs little is tried often, one that costs much seldom, and all trials together cost a few per cent. Steps
in which a drafter found nothing, and paid nothing for that, count as plain ones: they cost the same. Only the clock is
measured, no model of the machine is assumed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SHORT_TREE = 3
_WINDOW = 24  # steps that a level's rate is computed from
_TRIAL_STEPS = 4  # steps before a level is judged
_SHARE = 0.015  # of the time, per level: what trials may lose
_PAUSE = 16  # steps between two trials of a level at least
_GIVE_UP = 5  # best-level steps' worth of loss that end a trial early
_MARGIN = 1.02  # a level must beat plain decoding by this much to be used


@dataclass(slots=True)
class _Level:
    max_nodes: int
    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    trial: int = _TRIAL_STEPS  # steps of the trial that is going on
    next_trial: int = 0
    debt: float = 0.0  # seconds lost in trials and not yet paid back

    @property
    def rate(self) -> float:
        """Tokens per second; the longest step is left out, since one disturbance would otherwise decide."""
        steps = sorted(self.steps, key=lambda step: step[1])
        steps = steps[:-1] if len(steps) > 2 else steps
        return sum(tokens for tokens, _ in steps) / max(1e-9, sum(seconds for _, seconds in steps))


class Controller:
    """Chooses the node budget of each step. One per engine; call ``choose``, run the step, call ``record``."""

    def __init__(self, full_budget: int) -> None:
        sizes = sorted({0, min(SHORT_TREE, full_budget), full_budget})
        self.levels = [_Level(size) for size in sizes]
        self.step = 0
        self._current = self.levels[0]

    def choose(self) -> int:
        """Nodes that the next step may draft."""
        self.step += 1
        self._current = self._pick()
        return self._current.max_nodes

    def record(self, drafted: int, emitted: float, seconds: float, is_costly: bool = False) -> None:
        """What the step did: tokens kept (for each sequence of a batch) and wall-clock seconds, drafting included.

        ``is_costly``: the step cost more than a plain one, whether or not anything was drafted.
        """
        if emitted <= 0:
            return
        level = self._current if drafted or is_costly else self.levels[0]
        level.steps.append((emitted, seconds))
        level.trial = max(0, level.trial - 1)
        best = self._best()
        loss = seconds - emitted / best.rate
        for other in self.levels:
            other.debt = max(0.0, other.debt - _SHARE * seconds + (loss if other is level is not best else 0.0))
        if level.debt > _GIVE_UP * sum(s for _, s in best.steps) / len(best.steps):
            level.trial = 0

    def _best(self) -> _Level:
        plain = self.levels[0]
        return max(self.levels, key=lambda level: level.rate * (_MARGIN if level is plain else 1.0))

    def _pick(self) -> _Level:
        for level in self.levels:
            if level.trial > 0:
                return level
        best = self._best()
        for level in self.levels:
            if level is not best and level.debt == 0.0 and self.step >= level.next_trial:
                level.trial, level.next_trial = _TRIAL_STEPS, self.step + _TRIAL_STEPS + _PAUSE
                level.steps.clear()
                return level
        return best
