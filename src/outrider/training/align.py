"""THE alignment of tokens, features, labels and masks: every objective asks here, none shifts anything itself.

Step i of a head stands at row t (features that predicted x_{t+1}). With ``first_label`` f (``heads/spec.py``; 2 for
heads that know x_{t+1}, 1 for models that do not):

    newest token that the step reads    x_{t + f - 1 + i}
    label                               x_{t + f + i}
    teacher: the row that predicted it  t + f - 1 + i
    supervised                          iff the target wrote the label, in the same document as row t

Projects differ by one in the mask (SpecForge#885); here it is the label's, always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.training.batch import Batch


@dataclass(frozen=True, slots=True)
class Aligned:
    """One step at every row t of a batch.

    Attributes:
        tokens: int64 [B, T], the newest token that the step reads; 0 where the row ends before it.
        labels: int64 [B, T], the token to predict; 0 where there is none.
        teacher: int64 [B, T], the row whose target distribution the label was drawn from, clipped to the row's end.
        mask: bool [B, T], whether the position is supervised.
    """

    tokens: Tensor
    labels: Tensor
    teacher: Tensor
    mask: Tensor

    def at_teacher(self, values: Tensor) -> Tensor:
        """``values`` [B, T, ...] of each position's teacher row."""
        index = self.teacher
        return values[torch.arange(len(index), device=index.device)[:, None], index]


def align(batch: Batch, step: int, first_label: int) -> Aligned:
    """Alignment of step ``step`` (from 0) of a head whose first step predicts x_{t + first_label}."""
    newest, label = first_label - 1 + step, first_label + step
    length = batch.tokens.shape[1]
    rows = torch.arange(length, device=batch.tokens.device)
    same = (shifted(batch.documents, label, -1) == batch.documents) & (batch.documents >= 0)
    return Aligned(
        tokens=shifted(batch.tokens, newest, 0),
        labels=shifted(batch.tokens, label, 0),
        teacher=(rows + newest).clamp(max=length - 1).expand_as(batch.tokens),
        mask=shifted(batch.answers, label, False) & same,
    )


def shifted(values: Tensor, by: int, fill: int | bool) -> Tensor:
    """``values`` [B, T] moved left by ``by``: entry t is values[t + by], ``fill`` beyond the end."""
    if by == 0:
        return values
    out = torch.full_like(values, fill)
    if by < values.shape[1]:
        out[:, :-by] = values[:, by:]
    return out
