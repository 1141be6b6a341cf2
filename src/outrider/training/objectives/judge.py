"""Logits of a head's steps against what the target says there: losses, right guesses, overlap.

The target's logits at all rows that any step is taught from are computed once, over the draft vocabulary. Positions
whose token is outside that vocabulary have no loss and count as misses. Knows no network and no alignment rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.base import FINAL_HIDDEN
from outrider.training.align import Aligned
from outrider.training.batch import Batch
from outrider.training.losses import LOSSES, Lesson, LossName, chunked, overlap
from outrider.training.objective import StepResult
from outrider.training.teacher import Teacher


class Judge:
    """Judges the steps of one batch.

    Args:
        teacher: the target over the head's draft vocabulary.
        loss: name in ``training/losses.py``; ``hard_cross_entropy`` asks for the labels, the others for the target's
            distribution.
        aligned: of every step.
        is_training: whether ``overlap`` and the misses outside the draft vocabulary can be left out.
    """

    def __init__(
        self, teacher: Teacher, loss: LossName, batch: Batch, aligned: Sequence[Aligned], is_training: bool
    ) -> None:
        self._teacher = teacher
        self._loss = loss
        self._batch = batch
        self._aligned = aligned
        self._is_training = is_training
        self._is_hard = loss == "hard_cross_entropy"
        wanted = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=batch.tokens.device)
        if not (self._is_hard and is_training):
            for one in aligned:
                wanted[_flat(one.teacher)[one.mask]] = True
        self._place = wanted.cumsum(0) - 1
        self._logits = teacher.logits(batch.features[FINAL_HIDDEN].flatten(0, 1)[wanted])
        self._probabilities = self._logits[:0] if self._is_hard else torch.softmax(self._logits, dim=-1)
        self._best = self._known_best(wanted)

    def chosen(self, step: int) -> Tensor:
        """bool [B, T], where the step's logits are wanted."""
        one = self._aligned[step]
        return one.mask & (self._index(one) >= 0) if self._is_training else one.mask

    def result(self, step: int, logits: Tensor) -> StepResult:
        """The outcome of a step from its logits [n, Vd] at the ``chosen`` positions."""
        kept = float("nan") if self._is_training else float(self.overlaps(step, logits).sum())
        return StepResult(self.loss(step, logits), self._aligned[step].mask, self.correct(step, logits), kept)

    def loss(self, step: int, logits: Tensor) -> Tensor:
        """Mean loss of the ``chosen`` positions whose token can be guessed, a scalar with its graph."""
        chosen = self.chosen(step)
        at = _flat(self._aligned[step].teacher)[chosen]
        lesson = Lesson(self._probabilities, self._index(self._aligned[step])[chosen])
        return self.mean(step, chunked(LOSSES[self._loss], logits, lesson, None if self._is_hard else self._place[at]))

    def correct(self, step: int, logits: Tensor) -> Tensor:
        """bool [B, T], where the best draft token is the target's best token."""
        one, chosen = self._aligned[step], self.chosen(step)
        correct = torch.zeros_like(one.mask)
        # max, not argmax: four times as fast in bfloat16
        guesses = self._teacher.ids[logits.detach().max(dim=-1).indices]
        correct[chosen] = guesses == one.at_teacher(self._best)[chosen]
        return correct

    def overlaps(self, step: int, logits: Tensor) -> Tensor:
        """sum min(p, q) [n], p being the target's true probabilities: what it gives to other tokens is lost."""
        at = _flat(self._aligned[step].teacher)[self.chosen(step)]
        true = self._teacher.true_probabilities(self._logits[self._place[at]], self._batch.log_sum.flatten()[at])
        return overlap(logits.detach(), true)

    def mean(self, step: int, losses: Tensor) -> Tensor:
        """Mean of ``losses`` [n] at the ``chosen`` positions whose token can be guessed; 0 when there are none."""
        can_be = self._index(self._aligned[step])[self.chosen(step)] >= 0
        return torch.where(can_be, losses, 0.0).sum() / can_be.sum().clamp_min(1)

    def final(self, step: int) -> Tensor:
        """The target's final hidden state where it predicted the labels of the ``chosen`` positions, [n, H]."""
        at = _flat(self._aligned[step].teacher)[self.chosen(step)]
        return self._batch.features[FINAL_HIDDEN].flatten(0, 1)[at]

    def _index(self, one: Aligned) -> Tensor:
        """Draft index [B, T] of the token that the loss looks at; -1 where it cannot be guessed."""
        return self._teacher.draft_index(one.labels if self._is_hard else one.at_teacher(self._best))

    def _known_best(self, wanted: Tensor) -> Tensor:
        """``Batch.best``; at rows of a prompt, where nobody looked, the best of the draft vocabulary."""
        best = self._batch.best.flatten()
        unknown = wanted & (best < 0)
        if bool(unknown.any()):
            best = best.clone()
            best[unknown] = self._teacher.ids[self._logits[self._place[unknown]].max(dim=-1).indices]
        return best.view_as(self._batch.best)


def _flat(teacher: Tensor) -> Tensor:
    """Row numbers [B, T] within batch rows -> within the flattened [B * T]."""
    count, length = teacher.shape
    return teacher + torch.arange(count, device=teacher.device)[:, None] * length
