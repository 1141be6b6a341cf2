"""AdamW over float32 masters, with clipping, a cosine schedule and mixed precision: the one place that changes a head.

AdamW is Loshchilov and Hutter 2019 (arXiv 1711.05101). Products run in bfloat16 by autocast where that was asked for;
parameters, moments and losses stay in float32. Knows nothing of data and files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.errors import RunError


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How parameters move.

    Attributes:
        learning_rate: at the top of the schedule.
        warmup: share of the training in which it rises from 0.
        floor: share of it that is left at the end.
        weight_decay: of matrices; vectors (norms, biases) are never decayed.
        clip: largest norm of the whole gradient.
    """

    learning_rate: float = 1e-3
    warmup: float = 0.05
    floor: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0


BETAS = (0.9, 0.95)


def scheduled(progress: float, warmup: float, floor: float) -> float:
    """Factor of the learning rate at ``progress`` in [0, 1]: a line up to 1, then half a cosine down to ``floor``."""
    if progress < warmup:
        return progress / warmup
    after = min(1.0, (progress - warmup) / max(1.0 - warmup, 1e-9))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * after))


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Products in ``dtype``; float32 is the parameters' own."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


class Optimizer:
    """AdamW with betas (0.9, 0.95).

    Args:
        parameters: float32, named for checkpoints.
        factors: of the learning rate, by parameter; 1 where it says nothing.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.settings = settings
        self.named = dict(parameters)
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self.named.items():
            decay = settings.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((decay, (factors or {}).get(name, 1.0)), []).append(parameter)
        self._adam = torch.optim.AdamW(
            [{"params": own, "weight_decay": decay, "factor": factor} for (decay, factor), own in groups.items()],
            lr=settings.learning_rate,
            betas=BETAS,
            fused=True,
        )

    def update(self, loss: Tensor, progress: float) -> float:
        """Move the parameters down the gradient of ``loss``.

        Args:
            progress: share of the training that is done; decides the learning rate.

        Returns:
            The gradient's norm before clipping.

        Raises:
            RunError: when the loss or the gradient is not finite; the parameters are then as they were.
        """
        self._adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(self.named.values(), self.settings.clip))
        if not math.isfinite(norm) or not math.isfinite(float(loss.detach())):
            raise RunError("the loss is no longer a finite number: the training diverged; use a lower --lr")
        rate = self.rate(progress)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["factor"]
        self._adam.step()
        return norm

    @property
    def has_moved(self) -> bool:
        """Whether there was an update, before a restart too."""
        return bool(self._adam.state)

    def rate(self, progress: float) -> float:
        """The learning rate at ``progress``."""
        return self.settings.learning_rate * scheduled(progress, self.settings.warmup, self.settings.floor)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by parameter, for a checkpoint."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.named.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state()`` of an equal optimiser."""
        for name, parameter in self.named.items():
            own = {key: state[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in state}
            if own:
                step = own.pop("step").to(parameter.device if parameter.is_cuda else "cpu")
                self._adam.state[parameter] = {"step": step, **{k: v.to(parameter.device) for k, v in own.items()}}
