"""Medusa-2: the backbone learns to be read by its heads, and stays what it was (Cai et al. 2024, arXiv 2401.10774).

Loss: KL(p || p') + weight * sum of 0.8^k L_k, p the target's distribution as it was, p' the one with the adapters on,
L_k Medusa-1's loss of head k. The first term is self-distillation: p comes from the feature files, whose final hidden
states are those of the target without adapters, so it costs no second pass. Features are evaluated anew for every
batch, for they change. Both terms look at the draft vocabulary, each distribution renormalised over it. THE RESULT IS
ANOTHER TARGET: decoding is exact for the new model, whose answers are close to the old one's and not the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.base import FINAL_HIDDEN
from outrider.training.adapters import Adapters
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.losses import Lesson, kl
from outrider.training.objective import BatchResult, Objective
from outrider.training.objectives.judge import Judge
from outrider.training.objectives.medusa import MedusaObjective
from outrider.training.small_model import TrainableLlama

HEADS, ADAPTERS = "heads", "adapters"


class Medusa2Objective(Objective):
    """See the module's docstring.

    Args:
        backbone: with ``adapters`` in place.
        adapters: what is trained of it.
        heads: Medusa-1's objective, with the target that the feature files are of as its teacher.
        weight: of the heads' loss (lambda_0; the paper's 0.2).
        head_rate: the heads' learning rate relative to the backbone's (the paper's 4).
    """

    method = "medusa2"
    features = (FINAL_HIDDEN,)

    def __init__(
        self,
        backbone: TrainableLlama,
        adapters: Adapters,
        heads: MedusaObjective,
        weight: float = 0.2,
        head_rate: float = 4.0,
    ) -> None:
        self.backbone = backbone
        self.module = nn.ModuleDict({ADAPTERS: adapters, HEADS: heads.network})
        self.heads = heads
        self.weight = weight
        self.head_rate = head_rate

    def rate_factors(self) -> dict[str, float]:
        return {f"{HEADS}.{name}": self.head_rate for name, _ in self.heads.network.named_parameters()}

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        hidden = self.backbone(batch.tokens, batch.documents, batch.positions)
        distance = self._distance(batch, hidden)
        found = replace(batch, features={FINAL_HIDDEN: hidden})
        network, options = self.heads.network, self.heads.options
        aligned = [align(batch, head, network.spec.first_label) for head in range(network.config.steps)]
        judge = Judge(self.heads.teacher, options.loss, batch, aligned, is_training)
        total = torch.zeros((), device=hidden.device)
        steps = []
        for head in range(len(aligned)):
            logits = self.heads.head_logits(found, head, judge.chosen(head), aligned, is_training)
            result = judge.result(head, logits)
            total = total + options.decay**head * result.loss
            steps.append(result)
        loss = distance + self.weight * total
        return BatchResult(loss, steps, {"kl": float(distance.detach()), "heads": float(total.detach())})

    def _distance(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Mean KL(p || p') over the rows that predict a token of an answer, a float32 scalar."""
        teacher = self.heads.teacher
        one = align(batch, 0, 1)
        before = teacher.logits(one.at_teacher(batch.features[FINAL_HIDDEN])[one.mask])
        now = F.linear(hidden[one.mask].to(teacher.rows.dtype), teacher.rows)
        lesson = Lesson(torch.softmax(before, dim=-1), torch.empty(0, dtype=torch.int64))
        return kl(now, lesson).sum() / one.mask.sum().clamp_min(1)
