"""What a weight file offers to ``models/decoder.py``: tensors under Hugging Face's names, dense or in int4 blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.models.config import DecoderConfig

GROUP = 32
"""Weights per quantisation group along the input dimension (Q4_0 and Q4_1's block size)."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [out, in] in 4-bit groups: ``weight = codes * scale + minimum``, one scale and minimum per 32 inputs.

    Attributes:
        codes: uint8 [out, in], values 0..15.
        scales: float32 [out, in / 32].
        minimums: float32 [out, in / 32].
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        out, size = self.codes.shape
        grouped = self.codes.view(out, size // GROUP, GROUP).to(torch.float32)
        return (grouped * self.scales[:, :, None] + self.minimums[:, :, None]).view(out, size)

    def rows(self, index: Tensor) -> Int4Weight:
        """The rows ``index``, for permuting heads."""
        return Int4Weight(self.codes[index], self.scales[index], self.minimums[index])


class Checkpoint(Protocol):
    """A validated weight file (or set of shards).

    Names are those of transformers' ``*ForCausalLM`` state dicts (``model.layers.0.self_attn.q_proj.weight``), with q
    and k rows in transformers' half-split rotary order, whatever the file's own order.
    """

    config: DecoderConfig
    source: str

    def names(self) -> Collection[str]:
        """All tensor names."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored or dequantised (float32, float16 or bfloat16).

        Raises:
            ModelFileError: when the tensor is missing, naming it and the file.
        """
        ...

    def int4(self, name: str) -> Int4Weight | None:
        """The matrix in 4-bit groups of 32 when the file stores it so (Q4_0, Q4_1), without requantising; else None."""
        ...
