"""What a trained early exit learns: the whole model's distribution from the state after its first blocks.

One step at every row: soft cross entropy between the exit's logits and the target's distribution of the very next token
(LayerSkip's early-exit loss, arXiv 2404.16710, with the target as teacher and frozen). The blocks before the exit run
as in the whole model on guesses too, so an accepted chain of guesses sees exactly the states of the text itself: the
chain that is reported, ``steps`` long, repeats the same outcomes at the following rows. ``training/align.py`` alone
shifts anything. Knows nothing of optimisers, precision (it follows autocast) and files.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outrider.heads.exit import EarlyExit
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.losses import LossName
from outrider.training.objective import BatchResult, StepResult
from outrider.training.objectives.head import HeadObjective
from outrider.training.objectives.judge import Judge


class ExitOptions(BaseModel):
    """Options of training an early exit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(4, description="guesses of the chain whose acceptance is simulated", ge=1, le=16)
    loss: LossName = Field("soft_cross_entropy", description="loss on the draft vocabulary")


class ExitObjective(HeadObjective[EarlyExit, ExitOptions]):
    """An early exit in training, see ``HeadObjective``; it starts as the target's plain exit after these blocks."""

    Options: ClassVar[type[BaseModel]] = ExitOptions

    def __init__(
        self, network: EarlyExit, target: LanguageModel, options: ExitOptions, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(network, target, options, dtype)
        self.features = (network.block, FINAL_HIDDEN)

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        one = align(batch, 0, self.network.spec.first_label)
        judge = Judge(self.teacher, self.options.loss, batch, [one], is_training)
        chosen = judge.chosen(0)
        logits = self.network({self.network.block: self._states(batch, chosen)})
        loss, correct = judge.loss(0, logits), judge.correct(0, logits)
        overlaps = None
        if not is_training:
            overlaps = torch.zeros(one.mask.shape, device=one.mask.device)
            overlaps[chosen] = judge.overlaps(0, logits).float()
        return BatchResult(loss, [self._at(batch, step, loss, correct, overlaps) for step in range(self.options.steps)])

    def _states(self, batch: Batch, chosen: Tensor) -> Tensor:
        """The exit's inputs at the chosen positions, [n, H], in the dtype of the parameters."""
        return batch.features[self.network.block][chosen].to(next(self.network.parameters()).dtype)

    def _at(self, batch: Batch, step: int, loss: Tensor, correct: Tensor, overlaps: Tensor | None) -> StepResult:
        """Step ``step`` of a chain from every row: the outcome at the row that reads the guess before it."""
        one = align(batch, step, self.network.spec.first_label)
        kept = float("nan") if overlaps is None else float(one.at_teacher(overlaps)[one.mask].sum())
        return StepResult(loss if step == 0 else loss.detach(), one.mask, one.at_teacher(correct) & one.mask, kept)
