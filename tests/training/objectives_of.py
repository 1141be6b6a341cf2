"""The training form of heads with a network for each depth, asked about one place of a text.

This is what drafters must equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.heads.network import DraftNetwork
from outrider.heads.per_depth import PerDepthNetwork
from outrider.models.base import LanguageModel
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.objectives.per_depth import PerDepthObjective, PerDepthOptions


def head_rows(network: DraftNetwork[Any], target: LanguageModel, feature: Tensor, tokens: Sequence[int] = ()) -> Tensor:
    """Logits over the target's vocabulary, float [heads, V], -inf for tokens that cannot be guessed.

    Args:
        feature: [1, H] at row 0 of a text.
        tokens: x_1, x_2, ... of that text; those that are not given are 0.
    """
    assert isinstance(network, PerDepthNetwork)
    steps = network.config.steps
    length = steps + 3
    text = torch.zeros((1, length), dtype=torch.int64)
    text[0, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    final = torch.zeros((1, length, feature.shape[-1]), dtype=feature.dtype)
    final[0, 0] = feature[0]
    everywhere = torch.ones((1, length), dtype=torch.bool)
    zeros = torch.zeros((1, length), dtype=torch.int64)
    batch = Batch(text, everywhere, zeros, zeros, {"final": final}, zeros, zeros.float())
    objective = PerDepthObjective(network, target, PerDepthOptions())
    aligned = [align(batch, head, network.spec.first_label) for head in range(steps)]
    first = torch.zeros((1, length), dtype=torch.bool)
    first[0, 0] = True
    full = torch.full((steps, target.vocab_size), -torch.inf)
    for head in range(steps):
        full[head, objective.teacher.ids] = objective.head_logits(batch, head, first, aligned)[0].detach()
    return full
