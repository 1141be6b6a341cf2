"""Turns speculation up, down and off by what it measures, so that it is never a loss that nobody sees.

Three levels: plain decoding, a short tree, the full budget. What a level is worth is its speed against plain decoding:
tokens kept over the time they took, in units of what a plain step takes, which is measured again every 64 steps at
least (a step that found nothing to guess measures it too, without its drafting). Acceptance is luck from step to step,
and a few dozen steps cannot tell 10% from nothing, so a level is used while it *may* be the best: by the upper end of
what its steps leave possible (discounted UCB, Garivier and Moulines 2011, arXiv:0805.3415), by what it did lately and
in the longer run. A clear loss is seen after a few steps, a small one after some hundred; old steps count less and
less, so a level that was turned off is tried again, the more rarely the more it lost. Steps in which a drafter found
nothing, and paid nothing for that, say nothing about a level: they cost what plain ones cost. Only the clock is
measured, no model of the machine is assumed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

SHORT_TREE = 3
_KEEP = math.exp(-1.0 / 160.0)  # what a step counts one step later
_MEMORIES = ((math.inf, 1.0), (24.0, 1.5))
"""Steps of its own after which a level's step counts 1/e besides, and standard errors above the mean that the level is
given: the longer memory finds small losses, the shorter one follows a turn for the worse."""
_SPREAD = 1.0  # standard deviation of a step's tokens, relative, believed of a level before it has shown its own
_OUTLIER = 4.0  # times its usual duration that a step counts at most: one disturbance decides nothing
_RESUMED = 1.5  # the same behind a pause, where the drafter first reads what it missed
_PAUSE = 16  # steps without a level that make a pause
_PLAIN_STEPS = 3  # before anything else: the median of three forgives a cold first one
_PLAIN_WINDOW = 5  # plain steps whose median is what a plain step takes
_PLAIN_AGE = 64  # steps after which that is measured anew
_CHANGED = 1.3  # times more or less that such a measurement is repeated at: the machine or the batch is another one
_FREE = 0.02  # share of a step below which drafting costs nothing that matters: a look-up that found nothing


@dataclass(slots=True)
class _Memory:
    """Discounted sums over steps: tokens x, and durations y in plain steps."""

    own: float  # what a step counts one step of the level later
    doubt: float
    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, tokens: float, duration: float, most: float) -> None:
        if self.count > 0.0:
            duration = min(duration, most * self.y / self.count)
        self._forget(self.own)
        self.count += 1.0
        self.x += tokens
        self.y += duration
        self.xx += tokens * tokens
        self.xy += tokens * duration
        self.yy += duration * duration

    def age(self) -> None:
        self._forget(_KEEP)

    def _forget(self, keep: float) -> None:
        self.count *= keep
        self.x *= keep
        self.y *= keep
        self.xx *= keep
        self.xy *= keep
        self.yy *= keep

    @property
    def hope(self) -> float:
        """Times plain decoding, at the upper end of what the steps leave possible."""
        if self.count < 1e-6:
            return math.inf
        speed, mean = self.x / self.y, self.x / self.count
        scatter = max(0.0, self.xx - 2.0 * speed * self.xy + speed * speed * self.yy)
        variance = (scatter + (_SPREAD * mean) ** 2) / (self.count + 1.0)
        return speed * (1.0 + self.doubt * math.sqrt(variance / self.count) / mean)


class _Level:
    """A tree size and what its steps did."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.last_step: int | None = None
        self.memories = [_Memory(math.exp(-1.0 / steps), doubt) for steps, doubt in _MEMORIES]

    @property
    def hope(self) -> float:
        return min(memory.hope for memory in self.memories)

    def add(self, step: int, tokens: float, duration: float) -> None:
        """Take in a step. The first one is not counted: the drafter reads the prompt, code is loaded."""
        if self.last_step is not None:
            most = _OUTLIER if step - self.last_step < _PAUSE else _RESUMED
            for memory in self.memories:
                memory.add(tokens, duration, most)
        self.last_step = step

    def age(self) -> None:
        for memory in self.memories:
            memory.age()


class Controller:
    """Chooses the node budget of each step. One per engine; call ``choose``, run the step, call ``record``."""

    def __init__(self, full_budget: int) -> None:
        sizes = sorted({min(SHORT_TREE, full_budget), full_budget} - {0})
        self.levels = [_Level(size) for size in sizes]
        self.step = 0
        self._current: _Level | None = None
        self._plain: deque[float] = deque(maxlen=_PLAIN_WINDOW)
        self._plain_age = 0
        self._is_plain_due = True

    @property
    def plain_seconds(self) -> float:
        """What a plain step takes; 0 before the first."""
        return median(self._plain) if self._plain else 0.0

    def choose(self) -> int:
        """Nodes that the next step may draft."""
        self.step += 1
        self._is_plain_due = len(self._plain) < _PLAIN_STEPS or self._plain_age >= _PLAIN_AGE
        if self._is_plain_due:
            self._current = None
        else:
            best = max(self.levels, key=lambda level: level.hope, default=None)
            self._current = best if best is not None and best.hope > 1.0 else None
        return 0 if self._current is None else self._current.max_nodes

    def record(
        self, drafted: int, emitted: float, seconds: float, draft_seconds: float = 0.0, has_extra_rows: bool = False
    ) -> None:
        """What the step did.

        Args:
            drafted: guesses of all sequences.
            emitted: tokens kept, for each sequence of a batch; a step that kept none is ignored.
            seconds: wall clock, drafting included.
            draft_seconds: of them, what drafting took.
            has_extra_rows: the target's pass had rows besides the tree.
        """
        if emitted <= 0:
            return
        is_plain = drafted == 0 and not has_extra_rows
        if self._current is not None and not (is_plain and draft_seconds <= _FREE * seconds):
            self._current.add(self.step, emitted, seconds / self.plain_seconds)
        self._plain_age += 1
        if is_plain:
            self._note_plain(seconds - draft_seconds)
        for level in self.levels:
            level.age()

    def _note_plain(self, seconds: float) -> None:
        """Take in what a plain step took; where it was asked for and came out otherwise, ask again at once."""
        self._plain.append(seconds)
        is_another = not 1.0 / _CHANGED < seconds / self.plain_seconds < _CHANGED
        self._plain_age = _PLAIN_AGE if self._is_plain_due and is_another else 0
