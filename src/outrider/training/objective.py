"""The contract between the training loop and a head: what a head is trained on, and what one batch says about it.

The loop owns batches, optimiser, precision, checkpoints and the table; an objective turns a batch into losses and
counts. One file a head in ``training/objectives``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outrider.heads.config import Feature
from outrider.training.batch import Batch


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's outcome on a batch.

    Attributes:
        loss: mean over the supervised positions that the loss looks at, float32 scalar with its graph.
        mask: bool [B, T], supervised positions (tokens outside the draft vocabulary included: they count as misses).
        correct: bool [B, T], whether the head's best token, as a target id, is the target's best token there; False
            where ``mask`` is.
        overlap: float32 sum over ``mask`` of sum_x min(p(x), q(x)), p the target's true distribution: the expected
            number of accepted draws at temperature 1. NaN when it was not computed.
    """

    loss: Tensor
    mask: Tensor
    correct: Tensor
    overlap: float = float("nan")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What an objective says about one batch.

    Attributes:
        loss: what is minimised, a float32 scalar.
        steps: per step (head), in order.
        parts: named shares of the loss, for the table.
    """

    loss: Tensor
    steps: list[StepResult]
    parts: dict[str, float] = field(default_factory=dict)


class Objective(ABC):
    """A head in training.

    Attributes:
        method: registered name.
        module: what is optimised and checkpointed (fp32 masters).
        features: hidden states that batches must bring.
    """

    method: str
    module: nn.Module
    features: tuple[Feature, ...]

    @abstractmethod
    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        """Losses and counts of one batch.

        Args:
            is_training: False turns off noise and dropout and computes ``overlap``.
            progress: share of the training that is done, in [0, 1], for objectives that change over time.
        """

    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser changes."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def rate_factors(self) -> dict[str, float]:
        """Factors of the learning rate by parameter's name in ``module``; 1 where it says nothing."""
        return {}


def simulated_acceptance(steps: list[StepResult]) -> tuple[int, int]:
    """(tokens kept, positions) of greedy drafting as a chain, from every position where all steps are supervised.

    A position keeps 1 token (the target's own) and one more for each step up to the first wrong one. The text is
    teacher-forced, which is what an accepted chain sees as well.
    """
    if not steps:
        return 0, 0
    everywhere = torch.stack([step.mask for step in steps]).all(dim=0)
    run = torch.stack([step.correct for step in steps]).int().cumprod(dim=0).sum(dim=0)
    count = int(everywhere.sum())
    return count + int(run[everywhere].sum()), count
