"""Losses against their formulas written out, and their chunked evaluation against the plain one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.training.losses import LOSSES, Lesson, LossName, chunked, overlap, smooth_l1


def example(n: int = 5, size: int = 7) -> tuple[Tensor, Lesson]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, size, generator=generator, dtype=torch.float64) * 2
    p = torch.randn(n, size, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return logits, Lesson(p, torch.randint(size, (n,), generator=generator))


def by_hand(name: LossName, p: list[float], q: list[float], y: int) -> float:
    kept = sum(min(a, b) for a, b in zip(p, q, strict=True))
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    share = math.exp(-3 * kept)
    return {
        "soft_cross_entropy": -sum(a * math.log(b) for a, b in zip(p, q, strict=True)),
        "hard_cross_entropy": -math.log(q[y]),
        "kl": divergence,
        "tv": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        "nla": -math.log(kept),
        "lk_hybrid": share * divergence + (1 - share) * (1 - kept),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_its_formula(name: LossName) -> None:
    logits, lesson = example()
    found = LOSSES[name](logits, lesson)
    q = logits.exp() / logits.exp().sum(-1, keepdim=True)
    rows = zip(lesson.probabilities.tolist(), q.tolist(), lesson.labels.tolist(), strict=True)
    assert found.tolist() == pytest.approx([by_hand(name, *row) for row in rows])


@pytest.mark.parametrize("name", ["kl", "tv", "nla", "lk_hybrid"])
def test_loss_is_zero_exactly_at_the_target(name: LossName) -> None:
    logits, lesson = example()
    at_target = LOSSES[name](lesson.probabilities.log(), lesson)
    torch.testing.assert_close(at_target, torch.zeros_like(at_target), atol=1e-12, rtol=0)
    assert bool((LOSSES[name](logits, lesson) > 0.01).all())


def test_soft_cross_entropy_and_kl_have_the_gradient_q_minus_p() -> None:
    logits, lesson = example()
    for name in ("soft_cross_entropy", "kl"):
        leaf = logits.clone().requires_grad_()
        LOSSES[name](leaf, lesson).sum().backward()  # type: ignore[index]
        torch.testing.assert_close(leaf.grad, logits.softmax(-1) - lesson.probabilities)


def test_a_label_outside_the_vocabulary_has_no_hard_loss() -> None:
    logits, lesson = example()
    labels = lesson.labels.clone()
    labels[2] = -1
    found = LOSSES["hard_cross_entropy"](logits, Lesson(lesson.probabilities, labels))
    assert float(found[2]) == 0.0
    assert int((found == 0).sum()) == 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [1, 64, 150])
def test_chunked_equals_plain_with_its_gradient(name: LossName, count: int) -> None:
    logits, lesson = example(count)
    rows = torch.randint(count, (count,), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain, pieces = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = LOSSES[name](plain, Lesson(lesson.probabilities[rows], lesson.labels))
    found = chunked(LOSSES[name], pieces, lesson, rows)
    torch.testing.assert_close(found, expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(pieces.grad, plain.grad)


def test_chunked_computes_in_float32_and_works_without_gradient_and_rows() -> None:
    logits, lesson = example()
    half = logits.bfloat16()
    lesson = Lesson(lesson.probabilities.float(), lesson.labels)
    with torch.no_grad():
        found = chunked(LOSSES["kl"], half, lesson)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, LOSSES["kl"](half.float(), lesson))
    assert chunked(LOSSES["kl"], half[:0], lesson).shape == (0,)


def test_overlap_of_true_probabilities_counts_what_lies_outside_as_lost() -> None:
    q = torch.tensor([[0.5, 0.5]])
    p = torch.tensor([[0.7, 0.1]])  # 0.2 on tokens that the head cannot guess
    assert overlap(q.log(), p).tolist() == pytest.approx([0.6])


def test_smooth_l1_is_quadratic_then_linear() -> None:
    output, feature = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.5, 3.0], [1.0, 1.0]])
    assert smooth_l1(output, feature).tolist() == pytest.approx([(0.125 + 2.5) / 2, 0.0])
