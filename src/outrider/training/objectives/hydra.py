"""Training of Hydra heads on a frozen target (Ankner et al. 2024, arXiv 2402.05109).

Every head reads the text's own tokens (teacher forcing) and learns the target's distribution; heads weigh the same.
Optional noise on the embeddings is NEFTune's (arXiv 2310.05914): uniform, at most alpha / sqrt(T H) for rows of T
tokens.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from outrider.training.batch import Batch
from outrider.training.objectives.per_depth import PerDepthObjective, PerDepthOptions


class HydraOptions(PerDepthOptions):
    """Hydra's defaults."""

    decay: float = Field(1.0, description="weight of each head relative to the one before", gt=0, le=1)
    noise_alpha: float = Field(0.0, description="size of the noise on embeddings in training (NEFTune's alpha)", ge=0)


class HydraObjective(PerDepthObjective):
    """See the module's docstring."""

    Options: ClassVar[type[BaseModel]] = HydraOptions
    options: HydraOptions

    def embed(self, tokens: Tensor, batch: Batch, is_training: bool) -> Tensor:
        found = super().embed(tokens, batch, is_training)
        if not is_training or not self.options.noise_alpha:
            return found
        most = self.options.noise_alpha / math.sqrt(batch.tokens.shape[1] * found.shape[-1])
        # torch's global generator: the loop saves and restores its state, so resuming is exact
        return found + (torch.rand_like(found) * 2.0 - 1.0) * most
