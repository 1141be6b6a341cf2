"""What recurrent heads (EAGLE-1, EAGLE-3, MTP) are trained on: steps unrolled over teacher-forced text.

EAGLE (arXiv 2401.15077): one step, the next feature by smooth L1 and its token by cross entropy, uniform noise on the
features. EAGLE-3 (arXiv 2503.01840): K steps under training-time-test attention, soft cross entropy weighted 0.8^i, no
feature loss. MTP (FastMTP, arXiv 2509.18362): one shared layer, K steps, each causal over its own states, hard cross
entropy weighted 0.6^i of sum 1. Evaluation sees what drafting sees, for all three.
``training/align.py`` alone shifts anything. Only supervised positions reach the output product. Knows nothing of
optimisers, precision (it follows autocast) and files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outrider.heads.network import RecurrentNetwork
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.training.align import Aligned, align
from outrider.training.batch import Batch
from outrider.training.losses import LossName, smooth_l1
from outrider.training.objective import BatchResult, StepResult
from outrider.training.objectives.head import HeadObjective
from outrider.training.objectives.judge import Judge
from outrider.training.unrolled_attention import CausalAttention, Rows, TrainingAttention, UnrolledAttention


class UnrolledOptions(BaseModel):
    """What the three objectives share; each has defaults of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(3, description="unrolled steps", ge=1, le=16)
    loss: LossName = Field("soft_cross_entropy", description="loss on the draft vocabulary")
    decay: float = Field(0.8, description="weight of each step relative to the one before", gt=0, le=1)
    noise: float = Field(0.0, description="uniform noise added to the target's features in training, at most", ge=0)
    k_warmup: float = Field(0.0, description="share of training over which the steps grow from 1", ge=0, le=1)


class EagleOptions(UnrolledOptions):
    """EAGLE-1's defaults."""

    steps: int = Field(1, description="unrolled steps", ge=1, le=16)
    noise: float = Field(0.1, description="uniform noise added to the target's features in training, at most", ge=0)
    feature_weight: float = Field(1.0, description="weight of the feature's smooth L1", ge=0)
    token_weight: float = Field(0.1, description="weight of the loss on the draft vocabulary", ge=0)


class Eagle3Options(UnrolledOptions):
    """EAGLE-3's defaults, and two departures from the paper (measured in docs/log.md)."""

    feature_weight: float = Field(0.0, description="weight of a smooth L1 between normed output and feature", ge=0)
    freeze_output: bool = Field(False, description="leave the output matrix as it starts: less to compute")


class MtpOptions(UnrolledOptions):
    """FastMTP's defaults."""

    loss: LossName = Field("hard_cross_entropy", description="loss on the draft vocabulary")
    decay: float = Field(0.6, description="weight of each step relative to the one before", gt=0, le=1)
    attention: Literal["causal", "unrolled"] = Field(
        "causal", description="in training: causal over each step's own states (FastMTP), or unrolled as in drafting"
    )


class UnrolledObjective(HeadObjective[RecurrentNetwork, UnrolledOptions]):
    """Common base, see ``HeadObjective``."""

    Options: ClassVar[type[BaseModel]] = UnrolledOptions

    def __init__(
        self,
        network: RecurrentNetwork,
        target: LanguageModel,
        options: UnrolledOptions,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(network, target, options, dtype)
        self.features = tuple(dict.fromkeys((*network.config.features, FINAL_HIDDEN)))

    # -- one batch ---------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        count = self.step_count(is_training, progress)
        aligned = [align(batch, step, self.network.spec.first_label) for step in range(count)]
        judge = Judge(self.teacher, self.options.loss, batch, aligned, is_training)
        weights = self.step_weights(count)
        results, parts = [], dict[str, float]()
        for step, (output, rows) in enumerate(self._unroll(batch, aligned, is_training)):
            output = output.flatten(0, 1)[rows.place[judge.chosen(step)]]
            result = judge.result(step, self.network.logits(output))
            shares = self.loss_shares(step, output, result, judge)
            results.append(replace(result, loss=torch.stack(list(shares.values())).sum()))
            for name, share in shares.items():
                parts[name] = parts.get(name, 0.0) + weights[step] * float(share.detach())
        total = sum(
            (weight * result.loss for weight, result in zip(weights, results, strict=True)),
            torch.zeros((), device=batch.tokens.device),
        )
        return BatchResult(total, results, parts)

    def step_count(self, is_training: bool, progress: float) -> int:
        """Steps at ``progress``: growing evenly from 1 during the warm-up, all of them in evaluation."""
        if not is_training or progress >= self.options.k_warmup:
            return self.options.steps
        return min(self.options.steps, 1 + int(self.options.steps * progress / self.options.k_warmup))

    def step_weights(self, count: int) -> list[float]:
        """Weight of each step's loss: decay^i."""
        return [self.options.decay**step for step in range(count)]

    def attention(self, is_training: bool) -> type[TrainingAttention]:
        """What the steps see. Evaluation always sees what drafting does, so that its acceptance is drafting's."""
        return UnrolledAttention

    def loss_shares(self, step: int, output: Tensor, result: StepResult, judge: Judge) -> dict[str, Tensor]:
        """Named shares of a step's loss, scalars; ``output`` [n, H]: the network's at the judge's chosen positions."""
        return {"token": result.loss}

    # -- the network over a whole batch --------------------------------------------------------------------------

    def _unroll(self, batch: Batch, aligned: list[Aligned], is_training: bool) -> Iterator[tuple[Tensor, Rows]]:
        """Each step's output [B, R, H] and its rows: all of them at step 0, later only the useful ones if that is
        the same thing."""
        network, dtype = self.network, self.compute_dtype()
        attention = self.attention(is_training)(network.config, batch)
        features = {name: batch.features[name].to(dtype) for name in network.config.features}
        if is_training and self.options.noise:
            # torch's global generator: the loop saves and restores its state, so resuming is exact
            features = {name: x + (torch.rand_like(x) * 2 - 1) * self.options.noise for name, x in features.items()}
        state = network.fuse(features)
        rows = Rows.where(torch.ones_like(batch.answers))
        for step, one in enumerate(aligned):
            if step == 1 and attention.is_row_local:
                rows = Rows.where(torch.stack([later.mask for later in aligned[1:]]).any(dim=0))
                state = rows.take(state)
            token = self.teacher.embed(rows.take(one.tokens)).to(dtype)
            output = network.step(token=token, state=state, attend=attention.at(step, rows))
            yield output, rows
            state = network.recur(output)


class Eagle3Objective(UnrolledObjective):
    """EAGLE-3, see the module's docstring."""

    Options: ClassVar[type[BaseModel]] = Eagle3Options
    options: Eagle3Options

    def __init__(
        self,
        network: RecurrentNetwork,
        target: LanguageModel,
        options: Eagle3Options,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(network, target, options, dtype)
        if options.freeze_output:
            network.get_parameter("lm_head.weight").requires_grad_(False)

    def loss_shares(self, step: int, output: Tensor, result: StepResult, judge: Judge) -> dict[str, Tensor]:
        shares = {"token": result.loss}
        if self.options.feature_weight:
            normed = self.network.get_submodule("norm")(output)
            shares["feature"] = self.options.feature_weight * judge.mean(step, smooth_l1(normed, judge.final(step)))
        return shares

    def initialise(self, seed: int) -> None:
        super().initialise(seed)
        rows = self.target.output_rows(self.network.draft_ids)
        with torch.no_grad():
            self.network.get_parameter("lm_head.weight").copy_(rows)


class EagleObjective(UnrolledObjective):
    """EAGLE-1 (and 2: same weights), see the module's docstring."""

    Options: ClassVar[type[BaseModel]] = EagleOptions
    options: EagleOptions

    def loss_shares(self, step: int, output: Tensor, result: StepResult, judge: Judge) -> dict[str, Tensor]:
        feature = judge.mean(step, smooth_l1(output, judge.final(step)))
        return {"feature": self.options.feature_weight * feature, "token": self.options.token_weight * result.loss}


class MtpObjective(UnrolledObjective):
    """MTP, see the module's docstring."""

    Options: ClassVar[type[BaseModel]] = MtpOptions
    options: MtpOptions

    def attention(self, is_training: bool) -> type[TrainingAttention]:
        return CausalAttention if is_training and self.options.attention == "causal" else UnrolledAttention

    def step_weights(self, count: int) -> list[float]:
        """decay^i, of sum 1."""
        weights = super().step_weights(count)
        return [weight / sum(weights) for weight in weights]
