"""What heads with a network for each depth are trained on (Medusa, Hydra): every head at every supervised position.

The heads do not read each other, so a batch is one pass: gather the supervised rows of a head, evaluate it there, and
compare with the target. ``training/align.py`` alone shifts anything. Knows nothing of optimisers, precision (it
follows autocast) and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outrider.heads.per_depth import PerDepthNetwork
from outrider.models.base import FINAL_HIDDEN
from outrider.training.align import Aligned, align
from outrider.training.batch import Batch
from outrider.training.losses import LossName
from outrider.training.objective import BatchResult
from outrider.training.objectives.head import HeadObjective
from outrider.training.objectives.judge import Judge


class PerDepthOptions(BaseModel):
    """What both objectives share; each has defaults of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: LossName = Field("soft_cross_entropy", description="loss on the draft vocabulary")
    decay: float = Field(0.8, description="weight of each head relative to the one before", gt=0, le=1)


class PerDepthObjective(HeadObjective[PerDepthNetwork[Any], PerDepthOptions]):
    """Common base, see ``HeadObjective``."""

    Options: ClassVar[type[BaseModel]] = PerDepthOptions
    features = (FINAL_HIDDEN,)

    def initialise(self, seed: int) -> None:
        """As the network says; output matrices of its own start as the target's rows."""
        super().initialise(seed)
        self.network.copy_target_rows(self.teacher.rows)

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        network = self.network
        aligned = [align(batch, head, network.spec.first_label) for head in range(network.config.steps)]
        judge = Judge(self.teacher, self.options.loss, batch, aligned, is_training)
        total = torch.zeros((), device=batch.tokens.device)
        results, parts = [], {}
        for head in range(len(aligned)):
            logits = self.head_logits(batch, head, judge.chosen(head), aligned, is_training)
            result = judge.result(head, logits)
            total = total + self.options.decay**head * result.loss
            parts[f"head {head + 1}"] = float(result.loss.detach())
            results.append(result)
        return BatchResult(total, results, parts)

    def head_logits(
        self, batch: Batch, head: int, chosen: Tensor, aligned: Sequence[Aligned], is_training: bool = False
    ) -> Tensor:
        """Logits [n, Vd] of one head at ``chosen``, bool [B, T] with n rows set; ``aligned`` is of every head."""
        network, dtype = self.network, self.compute_dtype()
        tokens: list[Tensor] = []
        if network.reads_tokens:
            newest = [one.tokens[chosen] for one in aligned[: head + 1]]
            tokens = [self.embed(ids, batch, is_training).to(dtype) for ids in newest]
        state = network.state(head, feature=batch.features[FINAL_HIDDEN][chosen].to(dtype), tokens=tokens)
        return network.logits(head, state)

    def embed(self, tokens: Tensor, batch: Batch, is_training: bool) -> Tensor:
        """What a head reads for token ids [n] of ``batch``: [n, H]."""
        return self.teacher.embed(tokens)
