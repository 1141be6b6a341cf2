"""Weight matrices in the formats that are fast for few rows and for many, behind one call: rows -> rows.

Facts that shaped this file (2 cores, AVX512-BF16): a bfloat16 product with oneDNN-prepacked weights costs about the
same from 1 to 16 rows; torch's int4 kernel reads a quarter of the bytes but its time grows with the rows, so it wins up
to about 8. ``Int4Linear`` therefore holds both, of the same dequantised values.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.checkpoint import GROUP, Int4Weight

INT4_BLOCK = 4
"""Rows that torch's int4 kernel takes in one go over the weights: a fifth costs more than the three before it."""
_INT4_ROWS = 32  # torch's int4 kernel works on blocks of output rows
_PACK_ROWS_HINT = 8  # oneDNN picks a blocked layout for this many rows; it serves 1 to 64 rows well


class Linear(Protocol):
    """rows [n, in] -> rows [n, out] in the same dtype."""

    nbytes: int

    def __call__(self, rows: Tensor) -> Tensor: ...


class DenseLinear:
    """Plain product, any dtype and device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.nbytes = weight.numel() * weight.element_size()

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)


class PackedLinear:
    """bfloat16 or float32 on a CPU with the weight reordered once into oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        weight = weight.to(dtype).contiguous()
        self.nbytes = weight.numel() * weight.element_size()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS_HINT)
        self.bias = None if bias is None else bias.to(dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return result


class Int4Linear:
    """4-bit groups for up to ``few`` rows, prepacked bfloat16 of the same values for more.

    The int4 kernel rounds scales and minimums to bfloat16 and dequantises in its own order, so the two differ by
    rounding; ``docs/guarantees.md`` gives the measured gap.
    """

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None, few: int = 8) -> None:
        self.few = few
        self.bias = None if bias is None else bias.to(torch.bfloat16)
        self.packed = torch._convert_weight_to_int4pack_for_cpu(weight.codes.to(torch.int32), 1)
        # The kernel computes (code - 8) * scale + zero.
        zeros = weight.minimums + 8.0 * weight.scales
        self.scales_and_zeros = torch.stack([weight.scales.T, zeros.T], dim=-1).to(torch.bfloat16).contiguous()
        self.many = PackedLinear(bf16_values(weight), bias)
        self.nbytes = self.packed.numel() + self.scales_and_zeros.numel() * 2 + self.many.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.shape[0] > self.few:
            return self.many(rows)
        result = torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales_and_zeros)
        return result if self.bias is None else result + self.bias


class Int8Linear:
    """8-bit weights, one scale per output row, up to ``few`` rows; prepacked bfloat16 of the same values for more."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, few: int = 1) -> None:
        self.few = few
        self.bias = None if bias is None else bias.to(torch.bfloat16)
        scales = (weight.float().abs().amax(dim=1) / 127.0).clamp_min(1e-12).to(torch.bfloat16)
        self.codes = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.scales = scales
        self.many = PackedLinear(self.codes.float() * scales.float()[:, None], bias)
        self.nbytes = self.codes.numel() + scales.numel() * 2 + self.many.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.shape[0] > self.few:
            return self.many(rows)
        result = torch._weight_int8pack_mm(rows, self.codes, self.scales)
        return result if self.bias is None else result + self.bias


def packed_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, int4: bool) -> Linear:
    """A product on a CPU in the form that is fastest for few rows; ``int4`` rounds the weight to 4-bit groups.

    Sizes that the 4-bit kernel does not take stay as they are.
    """
    if int4 and dtype is torch.bfloat16 and weight.shape[1] % GROUP == 0 and weight.shape[0] % _INT4_ROWS == 0:
        return Int4Linear(quantize_int4(weight), bias)
    return PackedLinear(weight, bias, dtype)


def bf16_values(weight: Int4Weight) -> Tensor:
    """The values that the int4 kernel multiplies by, bfloat16 [out, in]; scales and minimums rounded as it does."""
    out, size = weight.codes.shape
    scales = weight.scales.to(torch.bfloat16).float()
    zeros = (weight.minimums + 8.0 * weight.scales).to(torch.bfloat16).float()
    codes = weight.codes.view(out, size // GROUP, GROUP).float() - 8.0
    return (codes * scales[:, :, None] + zeros[:, :, None]).view(out, size).to(torch.bfloat16)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """Round a matrix [out, in] to 4-bit groups of 32 between each group's minimum and maximum (the Q4_1 rule).

    Raises:
        ValueError: when ``in`` is not a multiple of 32.
    """
    out, size = weight.shape
    if size % GROUP:
        raise ValueError(f"int4 needs the input size to be a multiple of {GROUP}, not {size}")
    groups = weight.float().view(out, size // GROUP, GROUP)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    scales = ((high - low) / 15.0).clamp_min(1e-12)
    codes = ((groups - low[:, :, None]) / scales[:, :, None]).round().clamp(0, 15)
    return Int4Weight(codes.view(out, size).to(torch.uint8), scales, low)
