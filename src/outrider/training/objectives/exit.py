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

from outrider.heads.build import start_network
from outrider.heads.exit import EarlyExit
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.losses import LOSSES, Lesson, LossName, chunked, overlap
from outrider.training.objective import BatchResult, Objective, StepResult
from outrider.training.teacher import Teacher


class ExitOptions(BaseModel):
    """Options of training an early exit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(4, description="guesses of the chain whose acceptance is simulated", ge=1, le=16)
    loss: LossName = Field("soft_cross_entropy", description="loss on the draft vocabulary")


class ExitObjective(Objective):
    """An early exit in training.

    Args:
        network: its ``draft_ids`` set; bound to the target's output rows here.
        target: gives frozen output rows and the final norm to start from, nothing else.
        dtype: of the rows; the target's by default. Under autocast they should be in its dtype.
    """

    Options: ClassVar[type[ExitOptions]] = ExitOptions

    def __init__(
        self, network: EarlyExit, target: LanguageModel, options: ExitOptions, dtype: torch.dtype | None = None
    ) -> None:
        self.method = network.spec.method
        self.module = self.network = network
        self.options = options
        self.features = (network.block, FINAL_HIDDEN)
        device = next(network.parameters()).device
        self.teacher = Teacher(target, network.draft_ids, dtype or target.dtype, device)
        self._target = target
        network.bind(self.teacher.rows, target.final_soft_cap)

    def initialise(self, seed: int) -> None:
        """Set every parameter for the start: the target's plain exit after these blocks."""
        start_network(self.network, self._target, seed)

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        one = align(batch, 0, self.network.spec.first_label)
        best = one.at_teacher(batch.best)
        is_hard = self.options.loss == "hard_cross_entropy"
        index = self.teacher.draft_index(one.labels if is_hard else best)
        in_loss = one.mask & (index >= 0)
        # outside the draft vocabulary there is nothing to learn, but evaluation asks for the overlap there as well
        chosen = in_loss if is_training else one.mask
        logits = self.network({self.network.block: self._states(batch, chosen)})
        target_logits = self.teacher.logits(one.at_teacher(batch.features[FINAL_HIDDEN])[chosen])
        lesson = Lesson(torch.softmax(target_logits, dim=-1), index[chosen])
        rows = torch.arange(len(logits), device=logits.device)
        loss = _mean(chunked(LOSSES[self.options.loss], logits, lesson, rows), in_loss[chosen])
        correct = torch.zeros_like(one.mask)
        # max, not argmax: four times as fast in bfloat16
        correct[chosen] = self.teacher.ids[logits.detach().max(dim=-1).indices] == best[chosen]
        overlaps = None
        if not is_training:
            true = self.teacher.true_probabilities(target_logits, one.at_teacher(batch.log_sum)[chosen])
            overlaps = torch.zeros(one.mask.shape, device=one.mask.device)
            overlaps[chosen] = overlap(logits.detach(), true).float()
        return BatchResult(loss, [self._at(batch, step, loss, correct, overlaps) for step in range(self.options.steps)])

    def _states(self, batch: Batch, chosen: Tensor) -> Tensor:
        """The exit's inputs at the chosen positions, [n, H], in the dtype of the parameters."""
        return batch.features[self.network.block][chosen].to(next(self.network.parameters()).dtype)

    def _at(self, batch: Batch, step: int, loss: Tensor, correct: Tensor, overlaps: Tensor | None) -> StepResult:
        """Step ``step`` of a chain from every row: the outcome at the row that reads the guess before it."""
        one = align(batch, step, self.network.spec.first_label)
        kept = float("nan") if overlaps is None else float(one.at_teacher(overlaps)[one.mask].sum())
        return StepResult(loss if step == 0 else loss.detach(), one.mask, one.at_teacher(correct) & one.mask, kept)


def _mean(losses: Tensor, kept: Tensor) -> Tensor:
    """Mean of the kept ones, 0 with a graph when there are none."""
    return torch.where(kept, losses, 0.0).sum() / kept.sum().clamp_min(1)
