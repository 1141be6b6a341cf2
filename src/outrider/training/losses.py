"""Losses between a head's logits and the target's distribution over the draft vocabulary: small pure functions.

Notation: q = softmax(logits) of the head, p the target's distribution renormalised over the draft vocabulary, y the
label. Everything is computed in float32 at least, whatever the logits' dtype, row by row: [n, Vd] -> [n]. sum min(p, q)
is the probability that a draw of q is kept by exact verification (arXiv 2211.17192), so total variation and its
relatives train acceptance itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LossName = Literal["soft_cross_entropy", "hard_cross_entropy", "kl", "tv", "nla", "lk_hybrid"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target says about n positions.

    Attributes:
        probabilities: float32 [n, Vd], p.
        labels: int64 [n], y as a draft index; -1 where the label is outside the draft vocabulary.
    """

    probabilities: Tensor
    labels: Tensor


class Loss(Protocol):
    """Losses [n] of logits [n, Vd]."""

    def __call__(self, logits: Tensor, lesson: Lesson) -> Tensor: ...


def log_probabilities(logits: Tensor) -> Tensor:
    """log q in float32 (float64 for float64 logits)."""
    return F.log_softmax(logits, dim=-1, dtype=_wide(logits))


def soft_cross_entropy(logits: Tensor, lesson: Lesson) -> Tensor:
    """-sum p log q (EAGLE, arXiv 2401.15077, and EAGLE-3, arXiv 2503.01840)."""
    return -(lesson.probabilities * log_probabilities(logits)).sum(-1)


def hard_cross_entropy(logits: Tensor, lesson: Lesson) -> Tensor:
    """-log q(y), 0 where the label is outside the draft vocabulary (Medusa, arXiv 2401.10774; FastMTP, 2509.18362)."""
    wide = logits.to(_wide(logits))
    return F.cross_entropy(wide, lesson.labels, ignore_index=-1, reduction="none")


def kl(logits: Tensor, lesson: Lesson) -> Tensor:
    """KL(p || q) = sum p (log p - log q) (Hinton et al., arXiv 1503.02531)."""
    entropy: Tensor = torch.special.entr(lesson.probabilities).sum(-1)
    return soft_cross_entropy(logits, lesson) - entropy


def overlap(logits: Tensor, probabilities: Tensor) -> Tensor:
    """sum min(p, q), [n]: the probability that a draw is kept (arXiv 2211.17192); p need not sum to 1."""
    return torch.minimum(probabilities, log_probabilities(logits).exp()).sum(-1)


def tv(logits: Tensor, lesson: Lesson) -> Tensor:
    """Total variation, 1 - sum min(p, q) (DistillSpec, arXiv 2310.08461)."""
    return 1.0 - overlap(logits, lesson.probabilities)


def nla(logits: Tensor, lesson: Lesson) -> Tensor:
    """-log sum min(p, q): negative log acceptance (arXiv 2602.23881)."""
    return -overlap(logits, lesson.probabilities).clamp_min(1e-12).log()


def lk_hybrid(logits: Tensor, lesson: Lesson) -> Tensor:
    """lam KL + (1 - lam) TV with lam = exp(-3 a), a = sum min(p, q) of the row, not differentiated (2602.23881).

    Far from the target KL leads, for total variation hardly has a slope there; near it total variation does.
    """
    kept = overlap(logits, lesson.probabilities)
    share = torch.exp(-3.0 * kept.detach())
    return share * kl(logits, lesson) + (1.0 - share) * (1.0 - kept)


def smooth_l1(output: Tensor, feature: Tensor) -> Tensor:
    """Mean over the last dimension of d^2 / 2 for |d| < 1, |d| - 1/2 beyond: [n, H] -> [n] (arXiv 2401.15077)."""
    wide = _wide(output)
    return F.smooth_l1_loss(output.to(wide), feature.to(wide), reduction="none").mean(-1)


LOSSES: dict[LossName, Loss] = {
    "soft_cross_entropy": soft_cross_entropy,
    "hard_cross_entropy": hard_cross_entropy,
    "kl": kl,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
}


def chunked(loss: Loss, logits: Tensor, lesson: Lesson, rows: Tensor | None = None) -> Tensor:
    """``loss`` [n] of logits [n, Vd], a few rows at a time, gradient included.

    Every intermediate of a softmax over thousands of tokens then stays in the processor's cache: half the time of whole
    matrices, and no float32 copies are kept for the backward pass. Not twice differentiable.

    Args:
        lesson: labels [n] and distributions [m, Vd], which several steps can share.
        rows: int64 [n], which of the distributions belongs to each position; ``None`` when they are in order.
    """
    losses: Tensor = _Chunked.apply(loss, logits, lesson, rows)  # type: ignore[no-untyped-call]
    return losses


class _Chunked(torch.autograd.Function):
    """Has the gradient ready after the forward pass: a row's loss depends on that row alone."""

    @staticmethod
    def forward(ctx: Any, loss: Loss, logits: Tensor, lesson: Lesson, rows: Tensor | None) -> Tensor:
        size = 64 if logits.device.type == "cpu" else 4096
        needs_gradient = ctx.needs_input_grad[1]
        gradient = torch.empty_like(logits) if needs_gradient else None
        losses = torch.empty(len(logits), dtype=_wide(logits), device=logits.device)
        for start in range(0, len(logits), size):
            here = slice(start, start + size)
            piece = logits[here].detach().requires_grad_(needs_gradient)
            table = lesson.probabilities[here if rows is None else rows[here]]
            with torch.set_grad_enabled(needs_gradient):
                values = loss(piece, Lesson(table, lesson.labels[here]))
                total = values.sum()
            losses[here] = values.detach()
            if gradient is not None:
                (gradient[here],) = torch.autograd.grad(total, piece)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * upstream[:, None].to(gradient.dtype), None, None


def _wide(values: Tensor) -> torch.dtype:
    """What losses of ``values`` are computed in."""
    return torch.promote_types(values.dtype, torch.float32)
