"""Distillation of a small model: SpecInfer's drafters (arXiv 2305.09781), soft cross-entropy (arXiv 1503.02531).

The loss is -sum p log q, p the target's true probabilities (final hidden state times output rows, less ``log_sum``) and
q the small model's over the whole vocabulary. Training looks at a part of the rows only, or the softmax would cost far
more than the model: the frequent tokens and every token that this batch wrote or wanted, with weight 1, and a few
others drawn uniformly, which stand for all the rest with weight (rest / drawn) in the sum of exp. So rare rows are
pushed down like any negative and cannot come to win unseen. Validation compares with every row of the small model's; p
is left out there for tokens that neither are frequent nor were written, which makes loss and overlap a little low.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.base import FINAL_HIDDEN
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.objective import BatchResult, Objective, StepResult
from outrider.training.small_model import TrainableLlama

FIRST_LABEL = 1
"""A model at row t has read x_t and predicts x_{t+1}."""

_CHUNK = 256  # rows of a product with the whole vocabulary


class SmallModelObjective(Objective):
    """See the module's docstring.

    Args:
        module: the student.
        target_rows: the target's output rows [V, target hidden], float32, on the training device.
        soft_cap: of the target's logits.
        frequent: int64 [n] ascending, the tokens that every batch is compared on.
        negatives: other tokens drawn for each batch.
        steps: length of the chain that acceptance is simulated for.
    """

    method = "small_model"
    features = (FINAL_HIDDEN,)

    def __init__(
        self,
        module: TrainableLlama,
        target_rows: Tensor,
        soft_cap: float | None,
        frequent: Tensor,
        negatives: int = 1024,
        steps: int = 5,
    ) -> None:
        self.module: TrainableLlama = module
        self.steps = steps
        self._target_rows = target_rows
        self._soft_cap = soft_cap
        self._frequent = frequent
        self._negatives = negatives

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        aligned = align(batch, 0, FIRST_LABEL)
        mask = aligned.mask
        hidden = self.module(batch.tokens, batch.documents, batch.positions)[mask]
        rows = _Rows(
            hidden=hidden,
            final=aligned.at_teacher(batch.features[FINAL_HIDDEN])[mask],
            log_sum=aligned.at_teacher(batch.log_sum)[mask],
            best=aligned.at_teacher(batch.best)[mask],
        )
        wanted = torch.cat([aligned.labels[mask], rows.best[rows.best >= 0]])
        if is_training:
            loss, is_correct, mass = self._sampled(rows, wanted, _seed(batch, progress))
            overlap = None
            parts = {"compared": mass}
        else:
            loss, is_correct, overlap = self._whole(rows, wanted)
            parts = {}
        return BatchResult(loss, self._chain(batch, loss, mask, is_correct, overlap), parts)

    def _sampled(self, rows: _Rows, wanted: Tensor, seed: int) -> tuple[Tensor, Tensor, float]:
        """Loss, whether each row's best token is right among the compared ones, and p's mean mass on them."""
        compared = torch.unique(torch.cat([self._frequent, wanted]))
        others = self._others(compared, seed)
        columns = torch.cat([compared, others])
        logits = F.linear(rows.hidden, F.embedding(columns, self.module.output_matrix)).float()
        rest = len(self.module.output_matrix) - len(compared)
        weight = torch.zeros(len(columns), device=logits.device)
        if len(others):
            weight[len(compared) :] = math.log(rest / len(others))
        log_q = torch.log_softmax(logits + weight, dim=-1)[:, : len(compared)]
        p = torch.exp(self._target_logits(rows.final, compared) - rows.log_sum[:, None])
        loss = -(p * log_q).sum() / max(1, len(p))
        return loss, columns[logits.argmax(dim=-1)] == rows.best, float(p.sum() / max(1, len(p)))

    @torch.no_grad()
    def _whole(self, rows: _Rows, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, whether each row's best token of all is right, and sum min(p, q) of each row."""
        compared = torch.unique(torch.cat([self._frequent, wanted]))
        total, is_correct, overlaps = rows.hidden.new_zeros((), dtype=torch.float32), [], []
        for start in range(0, len(rows.hidden), _CHUNK):
            part = slice(start, start + _CHUNK)
            log_q = torch.log_softmax(F.linear(rows.hidden[part], self.module.output_matrix).float(), dim=-1)
            p = torch.exp(self._target_logits(rows.final[part], compared) - rows.log_sum[part, None])
            is_correct.append(log_q.argmax(dim=-1) == rows.best[part])
            log_q = log_q[:, compared]
            total = total - (p * log_q).sum()
            overlaps.append(torch.minimum(p, log_q.exp()).sum(dim=-1))
        if not is_correct:
            return total, rows.best >= 0, total.new_zeros(0)
        return total / len(rows.hidden), torch.cat(is_correct), torch.cat(overlaps)

    @torch.no_grad()
    def _target_logits(self, final: Tensor, columns: Tensor) -> Tensor:
        matrix = self._target_rows[columns]
        logits = F.linear(final.to(matrix.dtype), matrix).float()
        return logits if self._soft_cap is None else self._soft_cap * torch.tanh(logits / self._soft_cap)

    def _others(self, compared: Tensor, seed: int) -> Tensor:
        """Distinct tokens that are not ``compared``, drawn uniformly; all of them when there are few."""
        size = len(self.module.output_matrix)
        is_free = torch.ones(size, dtype=torch.bool, device=compared.device)
        is_free[compared] = False
        free = is_free.nonzero()[:, 0]
        order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))[: self._negatives]
        return free[order.to(free.device)]

    def _chain(
        self, batch: Batch, loss: Tensor, mask: Tensor, is_correct: Tensor, overlap: Tensor | None
    ) -> list[StepResult]:
        """Step i of a chain drafted at row t is what the model says at row t + i."""
        correct = torch.zeros_like(mask)
        correct[mask] = is_correct
        kept = torch.zeros(mask.shape, device=mask.device)
        if overlap is not None:
            kept[mask] = overlap
        steps = []
        for step in range(self.steps):
            aligned = align(batch, step, FIRST_LABEL)
            own = aligned.mask
            share = float(aligned.at_teacher(kept)[own].sum()) if overlap is not None else float("nan")
            steps.append(StepResult(loss, own, aligned.at_teacher(correct) & own, share))
        return steps


class _Rows:
    """The supervised rows of a batch: the student's states, and what the target says there."""

    __slots__ = ("best", "final", "hidden", "log_sum")

    def __init__(self, *, hidden: Tensor, final: Tensor, log_sum: Tensor, best: Tensor) -> None:
        self.hidden, self.final, self.log_sum, self.best = hidden, final, log_sum, best


def _seed(batch: Batch, progress: float) -> int:
    """Of the draws: a function of what was passed in, so that a resumed run draws what the first one would have."""
    return (int(batch.tokens.sum()) << 20) ^ int(progress * (1 << 30))
