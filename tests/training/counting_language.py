"""A target that counts, x_{t+1} = x_t + 1 modulo the vocabulary: whoever is off by one anywhere guesses wrong always.

Hidden states name the next token, embeddings the token itself; logits are their product with the output rows, so the
same model serves as the teacher in training and as the target of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.base import FULL, Sublayers
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import IntArray
from outrider.training.batch import Batch
from outrider.training.objective import Objective


class CountingTarget(ToyModel):
    """One-hot features and embeddings of the vocabulary's size."""

    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__(vocab_size=vocab_size)
        self.hidden_size = vocab_size  # type: ignore[misc]

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocab_size).double()

    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        rows = 4.0 * torch.eye(self.vocab_size, dtype=torch.float64)
        return rows if tokens is None else rows[tokens]

    def _logits(self, view: IntArray, skip: Sublayers = FULL) -> Tensor:
        return self.output_rows() @ self._hidden(view, "final", skip)

    def _hidden(self, view: IntArray, name: str | int, skip: Sublayers) -> Tensor:
        following = torch.zeros(self.vocab_size, dtype=torch.float64)
        following[(int(view[-1]) + 1) % self.vocab_size] = 3.0
        return following


def counting_batch(target: CountingTarget, starts: Sequence[int], prompt: int = 2, length: int = 12) -> Batch:
    """One document a row, ``length`` tokens from ``starts[b]`` on."""
    size = (len(starts), length)
    tokens = (torch.tensor(starts)[:, None] + torch.arange(length)) % target.vocab_size
    final = 3.0 * target.embed((tokens + 1) % target.vocab_size)
    logits = final @ target.output_rows().T
    return Batch(
        tokens=tokens,
        answers=torch.arange(length).expand(size) >= prompt,
        documents=torch.zeros(size, dtype=torch.int64),
        positions=torch.arange(length).expand(size),
        features={"final": final},
        best=logits.argmax(-1),
        log_sum=logits.logsumexp(-1).float(),
    )


def train(objective: Objective, batch: Batch, steps: int, rate: float = 3e-2) -> list[float]:
    """A few plain Adam steps on one batch; the losses."""
    optimiser = torch.optim.Adam(objective.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        result = objective.evaluate(batch, True, step / steps)
        optimiser.zero_grad()
        result.loss.backward()
        optimiser.step()
        losses.append(float(result.loss.detach()))
    return losses


def top1(objective: Objective, batch: Batch) -> list[float]:
    """Share of right guesses of every head."""
    with torch.no_grad():
        steps = objective.evaluate(batch, False, 1.0).steps
    return [float(step.correct.sum()) / float(step.mask.sum()) for step in steps]
