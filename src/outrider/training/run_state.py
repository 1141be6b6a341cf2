"""What a training run is told, counts and says: plain data, all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.training.batches import Place
from outrider.training.figures import Figures, Tally
from outrider.training.optimizer import OptimizerSettings


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How long and how a run trains. All of it decides the result.

    Attributes:
        tokens, seconds: the budget; exactly one of them is set. Seconds are those spent, the time between a stop and
            a new start aside.
        batch_rows: packed rows of a batch.
        seed: of the order of the data and of the noise.
        dtype: of the products.
        validations: times that the validation answers are evaluated, evenly spread; the end is the last.
        keep_best: end with the parameters of the best validation instead of the last ones.
        optimizer: how parameters move.
    """

    tokens: int | None = 2_000_000
    seconds: float | None = None
    batch_rows: int = 4
    seed: int = 0
    dtype: torch.dtype = torch.float32
    validations: int = 20
    keep_best: bool = False
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What changes nothing about the result.

    Attributes:
        folder: of checkpoints and curves.
        checkpoint_seconds, checkpoint_batches: a checkpoint is written when either has passed.
        report_seconds: between two reports.
        report: called with what there is to show.
    """

    folder: Path
    checkpoint_seconds: float = 600.0
    checkpoint_batches: int = 1_000_000
    report_seconds: float = 10.0
    report: Callable[[Report], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Report:
    """One line of the table.

    Attributes:
        is_validation: whether ``figures`` are of the validation answers.
        tokens_per_second: since this process started.
        seconds_left: estimate for the rest.
    """

    is_validation: bool
    tokens: int
    epoch: float
    tokens_per_second: float
    seconds_left: float
    figures: Figures


@dataclass(slots=True)
class Progress:
    """Everything that counts up, as checkpoints keep it. ``validation`` is of the parameters that the run ends with."""

    tokens: int = 0
    seconds: float = 0.0
    batches: int = 0
    place: Place = field(default_factory=Place)
    validations: int = 0
    best: float | None = None
    validation: Figures | None = None
    tally: Tally = field(default_factory=Tally)
    curves: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        found = {
            name: getattr(self, name) for name in ("tokens", "seconds", "batches", "validations", "best", "curves")
        }
        parts: dict[str, Place | Tally | Figures | None]
        parts = {"place": self.place, "tally": self.tally, "validation": self.validation}
        return found | {name: _fields(part) for name, part in parts.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        validation = values["validation"]
        parts = {
            "place": Place(**values["place"]),
            "tally": Tally(**values["tally"]),
            "validation": None if validation is None else Figures(**validation),
        }
        return cls(**{**values, **parts})


def settings_json(settings: LoopSettings) -> dict[str, Any]:
    """Everything of ``settings`` by name, plain JSON."""
    names = ("tokens", "seconds", "batch_rows", "seed", "validations", "keep_best")
    found: dict[str, Any] = {name: getattr(settings, name) for name in names}
    found["dtype"] = str(settings.dtype).removeprefix("torch.")
    own = settings.optimizer
    return found | {name: getattr(own, name) for name in type(own).__slots__}


def _fields(part: Place | Tally | Figures | None) -> dict[str, Any] | None:
    return None if part is None else {name: getattr(part, name) for name in type(part).__slots__}
