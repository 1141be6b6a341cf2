"""Means of what objectives say about batches: loss, top-1 and overlap of each step, simulated acceptance length."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.training.objective import BatchResult, simulated_acceptance


@dataclass(slots=True)
class Tally:
    """Sums over batches; plain numbers, so that a checkpoint can keep them exactly.

    Attributes:
        positions: supervised ones of each step.
        correct, overlap: sums over these.
        kept, starts: tokens kept by greedy chains, and positions that they started from.
        loss, batches: sum over batches, and their number.
    """

    loss: float = 0.0
    batches: int = 0
    positions: list[int] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    kept: int = 0
    starts: int = 0

    def add(self, result: BatchResult) -> None:
        """Count one batch in."""
        self.loss += float(result.loss.detach())
        self.batches += 1
        missing = len(result.steps) - len(self.positions)
        self.positions += [0] * missing
        self.correct += [0] * missing
        self.overlap += [0.0] * missing
        for number, step in enumerate(result.steps):
            self.positions[number] += int(step.mask.sum())
            self.correct[number] += int(step.correct.sum())
            self.overlap[number] += step.overlap
        kept, starts = simulated_acceptance(result.steps)
        self.kept += kept
        self.starts += starts

    def figures(self) -> Figures:
        """Means so far."""
        return Figures(
            loss=_ratio(self.loss, self.batches),
            top1=[_ratio(c, n) for c, n in zip(self.correct, self.positions, strict=True)],
            overlap=[_ratio(o, n) for o, n in zip(self.overlap, self.positions, strict=True)],
            acceptance=_ratio(self.kept, self.starts),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over some batches; ``None`` where nothing was counted or computed.

    Attributes:
        loss: what was minimised.
        top1: per step, share of positions where the head's best token is the target's best.
        overlap: per step, expected acceptance of one draw at temperature 1.
        acceptance: simulated acceptance length of a greedy chain, the target's own token included.
    """

    loss: float | None
    top1: list[float | None]
    overlap: list[float | None]
    acceptance: float | None

    def as_json(self) -> dict[str, Any]:
        """Rounded, without what was not computed."""
        return {name: _rounded(value) for name, value in asdict(self).items() if _is_known(value)}


def _ratio(total: float, count: int) -> float | None:
    return total / count if count and math.isfinite(total) else None


def _is_known(value: object) -> bool:
    return value is not None and value != [] and not (isinstance(value, list) and None in value)


def _rounded(value: Any) -> Any:
    return [_rounded(one) for one in value] if isinstance(value, list) else round(value, 6)
