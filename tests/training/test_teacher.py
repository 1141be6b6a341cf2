"""What the teacher says about draft tokens against the target's own words."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.models.base import FINAL_HIDDEN, Segment
from outrider.models.toy import ToyModel
from outrider.training.teacher import Teacher
from training.tiny_targets import decoder

CPU = torch.device("cpu")


def test_logits_and_probabilities_are_the_targets(tmp_path: Path) -> None:
    target = decoder(tmp_path)
    tokens = [3, 1, 4, 1, 5, 9, 2]
    output = target.forward([Segment(target.new_cache(), tokens)], [FINAL_HIDDEN])[0]
    draft = torch.tensor([0, 2, 3, 7, 11])
    teacher = Teacher(target, draft, target.dtype, CPU)
    logits = teacher.logits(output.hidden[FINAL_HIDDEN])
    torch.testing.assert_close(logits, output.logits[:, draft].float(), rtol=1e-4, atol=1e-4)
    true = teacher.true_probabilities(logits, output.logits.float().logsumexp(-1))
    torch.testing.assert_close(true, output.logits.float().softmax(-1)[:, draft], rtol=1e-4, atol=1e-5)
    assert bool((true.sum(-1) < 1).all())


def test_embeddings_are_the_targets_in_the_training_dtype() -> None:
    target = ToyModel(vocab_size=12)
    teacher = Teacher(target, None, torch.bfloat16, CPU)
    tokens = torch.tensor([[1, 5], [11, 0]])
    assert teacher.embedding.dtype is teacher.rows.dtype is torch.bfloat16
    torch.testing.assert_close(teacher.embed(tokens), target.embed(tokens).bfloat16())


def test_draft_indices_of_known_unknown_and_outside_tokens() -> None:
    teacher = Teacher(ToyModel(vocab_size=12), torch.tensor([2, 3, 8]), torch.float64, CPU)
    assert teacher.draft_index(torch.tensor([[3, 8], [0, -1]])).tolist() == [[1, 2], [-1, -1]]
    assert teacher.ids[teacher.draft_index(torch.tensor([2, 3, 8]))].tolist() == [2, 3, 8]


def test_soft_cap_is_applied_to_logits() -> None:
    target = ToyModel(vocab_size=6)
    final = torch.randn((4, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 20
    plain = Teacher(target, None, torch.float64, CPU).logits(final)
    target.final_soft_cap = 5.0
    capped = Teacher(target, None, torch.float64, CPU).logits(final)
    torch.testing.assert_close(capped, 5.0 * torch.tanh(plain / 5.0))
    assert float(plain.abs().max()) > 5.0


def test_logits_have_no_graph() -> None:
    teacher = Teacher(ToyModel(vocab_size=6), None, torch.float32, CPU)
    assert not teacher.logits(torch.randn(2, 8, requires_grad=True)).requires_grad
