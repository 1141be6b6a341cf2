"""Checkpoint tensors -> the linear layers, norms and embedding of one decoder, in the chosen format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from outrider.errors import InvalidOptionError
from outrider.models.checkpoint import GROUP, Checkpoint, Int4Weight
from outrider.models.linear import DenseLinear, Int4Linear, Int8Linear, Linear, PackedLinear, quantize_int4


class WeightFormat(StrEnum):
    """How matrices are held. ``auto``: 4-bit groups where the file has them, else the compute dtype."""

    AUTO = "auto"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Compute dtype, weight format and device of a decoder.

    Raises:
        InvalidOptionError: for a format that the dtype or device has no kernel for.
    """

    dtype: torch.dtype
    format: WeightFormat
    device: torch.device

    def __post_init__(self) -> None:
        quantised = self.format in (WeightFormat.INT8, WeightFormat.INT4)
        if quantised and (self.device.type != "cpu" or self.dtype is not torch.bfloat16):
            raise InvalidOptionError(
                f"--weights {self.format.value} runs with --dtype bfloat16 on a CPU, "
                f"not {str(self.dtype).removeprefix('torch.')} on {self.device.type}; use --weights auto"
            )
        if self.format is WeightFormat.BF16 and self.dtype is not torch.bfloat16:
            name = str(self.dtype).removeprefix("torch.")
            raise InvalidOptionError(
                f"--weights bf16 needs --dtype bfloat16, not {name}; {name} runs with --weights auto"
            )

    @property
    def packed(self) -> bool:
        """Whether matrices go through oneDNN's kernels with prepacked weights."""
        if self.device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        if self.dtype is torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return self.dtype is torch.float32


class WeightLoader:
    """Builds the layers of one decoder from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, plan: WeightPlan) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.names = frozenset(checkpoint.names())
        self.has_int4 = False  # whether any matrix ended up in 4-bit groups

    def linear(self, stems: Sequence[str], orders: Sequence[Tensor | None] = (), bias: bool = False) -> Linear:
        """One matrix from the rows of several (``stem.weight``), each optionally reordered, stacked."""
        orders = orders or [None] * len(stems)
        biases = [self._reordered(f"{s}.bias", o) for s, o in zip(stems, orders, strict=True)] if bias else []
        joined_bias = torch.cat(biases) if biases else None
        blocks = self._int4(stems, orders)
        if blocks is not None:
            self.has_int4 = True
            return Int4Linear(blocks, joined_bias)
        weight = torch.cat([self._reordered(f"{s}.weight", o) for s, o in zip(stems, orders, strict=True)])
        return self._dense(weight, joined_bias, quantise=True)

    def head(self, weight: Tensor) -> Linear:
        """The language-model head: never rounded further than the compute dtype."""
        return self._dense(weight, None, quantise=False)

    def vector(self, name: str, offset: float = 0.0, order: Tensor | None = None) -> Tensor:
        """A norm's weight in the compute dtype."""
        value = self._reordered(name, order).float() + offset
        return value.to(self.plan.device, self.plan.dtype)

    def matrix(self, name: str) -> Tensor:
        """A matrix in the compute dtype (embeddings)."""
        return self.checkpoint.tensor(name).to(self.plan.device, self.plan.dtype)

    def _reordered(self, name: str, order: Tensor | None) -> Tensor:
        tensor = self.checkpoint.tensor(name)
        return tensor if order is None else tensor[order]

    def _int4(self, stems: Sequence[str], orders: Sequence[Tensor | None]) -> Int4Weight | None:
        if (
            self.plan.dtype is not torch.bfloat16
            or not self.plan.packed
            or self.plan.format not in (WeightFormat.AUTO, WeightFormat.INT4)
        ):
            return None
        parts: list[Int4Weight] = []
        for stem, order in zip(stems, orders, strict=True):
            part = self.checkpoint.int4(f"{stem}.weight")
            if part is None and self.plan.format is WeightFormat.INT4:
                weight = self.checkpoint.tensor(f"{stem}.weight")
                if weight.shape[1] % GROUP:
                    raise InvalidOptionError(
                        f"--weights int4 needs input sizes that are multiples of {GROUP}, but '{stem}' has "
                        f"{weight.shape[1]}; use --weights auto"
                    )
                part = quantize_int4(weight)
            if part is None:
                return None
            parts.append(part if order is None else part.rows(order))
        return Int4Weight(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scales for p in parts]),
            torch.cat([p.minimums for p in parts]),
        )

    def _dense(self, weight: Tensor, bias: Tensor | None, quantise: bool) -> Linear:
        plan = self.plan
        if plan.packed and quantise and plan.format is WeightFormat.INT8:
            return Int8Linear(weight, bias)
        if plan.packed:
            return PackedLinear(weight, bias, plan.dtype)
        return DenseLinear(
            weight.to(plan.device, plan.dtype), None if bias is None else bias.to(plan.device, plan.dtype)
        )
