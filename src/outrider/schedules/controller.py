"""Turns speculation up, down and off by what it measures, so that it is never a loss that nobody sees.

Three levels: plain decoding, a short tree, the full budget. Each keeps the tokens per second of its latest steps; the best
one is used, the others are tried again after a while, more rarely each time that they lose. Steps in which a drafter found
nothing count as plain ones: they cost the same. Only the clock is measured, no model of the machine is assumed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SHORT_TREE = 3
_WINDOW = 12  # steps that a level's rate is computed from
_FIRST_TRIAL = 4  # steps before a level may be judged
_PROBE_STEPS = 3
_FIRST_PAUSE = 24  # steps between probes of a losing level, doubled up to
_LONGEST_PAUSE = 384
_MARGIN = 1.02  # a level must beat plain decoding by this much to be used


@dataclass(slots=True)
class _Level:
    max_nodes: int
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    pause: int = _FIRST_PAUSE
    next_probe: int = 0
    probes_left: int = _FIRST_TRIAL

    @property
    def rate(self) -> float:
        """Tokens per second; the slowest step is left out, since one disturbance would otherwise decide."""
        steps = sorted(self.steps, key=lambda step: step[1] / step[0])
        steps = steps[:-1] if len(steps) > 2 else steps
        return sum(tokens for tokens, _ in steps) / max(1e-9, sum(seconds for _, seconds in steps))


class Controller:
    """Chooses the node budget of each step. One per engine; call ``choose``, run the step, call ``record``."""

    def __init__(self, full_budget: int) -> None:
        sizes = sorted({0, min(SHORT_TREE, full_budget), full_budget})
        self.levels = [_Level(size) for size in sizes]
        self.step = 0
        self._current = self.levels[-1]

    def choose(self) -> int:
        """Nodes that the next step may draft."""
        self.step += 1
        self._current = self._pick()
        return self._current.max_nodes

    def record(self, drafted: int, emitted: int, seconds: float) -> None:
        """What the step did: tokens kept and wall-clock seconds, drafting included."""
        level = self._current if drafted else self.levels[0]
        if emitted > 0:
            level.steps.append((emitted, seconds))
        if level.probes_left > 0:
            level.probes_left -= 1

    @property
    def is_speculating(self) -> bool:
        """Whether the latest step was allowed to draft."""
        return self._current.max_nodes > 0

    def _pick(self) -> _Level:
        for level in reversed(self.levels):
            if level.probes_left > 0:
                return level
        plain = self.levels[0]
        best = max(self.levels, key=lambda lv: lv.rate * (_MARGIN if lv is plain else 1.0))
        for level in self.levels:
            if level is best:
                level.pause = _FIRST_PAUSE
                level.next_probe = self.step + level.pause
            elif self.step >= level.next_probe:
                level.pause = min(_LONGEST_PAUSE, level.pause * 2)
                level.next_probe = self.step + level.pause
                level.probes_left = _PROBE_STEPS
                level.steps.clear()
                return level
        return best
