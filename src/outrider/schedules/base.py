"""The contract of a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from outrider.schedules.sequence import RunningSequence
from outrider.types import StepRecord


class Schedule(ABC):
    """Advances running sequences. Both methods append to each sequence's ``output`` and ``records``."""

    summary: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def prefill(self, sequence: RunningSequence) -> StepRecord:
        """Evaluate the prompt and emit the first token."""

    @abstractmethod
    def step(self, sequences: Sequence[RunningSequence]) -> list[StepRecord]:
        """One draft -> verify -> commit step for every (unfinished, prefilled) sequence."""
