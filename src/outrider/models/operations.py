"""The small operations between a decoder's matrix products, in torch: the reference for ``models/compiled.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.attention import attend
from outrider.models.config import DecoderConfig


class Place(NamedTuple):
    """One sequence's part of a pass: rows ``first ... stop - 1``, and what ``attention`` takes besides them."""

    first: int
    stop: int
    entries: Tensor
    start: int
    bias: Tensor | None


class TorchOperations:
    """Norm, activation and attention of one decoder, any dtype and device."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Residual sum and its norm: (x + delta, rms_norm(x + delta) * weight), each [n, hidden]."""
        total = x if delta is None else x + delta
        return total, F.rms_norm(total, weight.shape, weight, self.config.norm_eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * intermediate] -> activation(gate) * up, [n, intermediate]."""
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")
        return active * up

    def attention(self, qkv: Tensor, turns: Tensor, entries: Tensor, start: int, bias: Tensor | None) -> Tensor:
        """Rotate one sequence's rows, write their keys and values, attend over everything up to them.

        Args:
            qkv: [n, heads + 2 * kv_heads, head_dim]; overwritten.
            turns: complex [n, head_dim / 2].
            entries: one block's cache [2 * kv_heads, capacity, head_dim]; rows go to ``start ... start + n - 1``.
            bias: additive mask [n, start + n] of 0 and -inf, or ``None``.

        Returns:
            [n, heads * head_dim].
        """
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        rotate(qkv[:, : heads + kv_heads], turns[:, None, :])
        stop = start + qkv.shape[0]
        entries[:, start:stop] = qkv[:, heads:].transpose(0, 1)
        keys, values = entries[:kv_heads, :stop], entries[kv_heads:, :stop]
        return attend(qkv[:, :heads], keys, values, bias, self.config.qk_scale, self.config.attention_soft_cap)

    def attention_of_all(self, qkv: Tensor, turns: Tensor, places: Sequence[Place]) -> Tensor:
        """``attention`` of every sequence of a pass.

        Args:
            qkv: [n, heads + 2 * kv_heads, head_dim], the rows of all sequences; overwritten.
            turns: complex [n, head_dim / 2].
            places: which rows are whose, in order and without gaps.

        Returns:
            [n, heads * head_dim].
        """
        parts = [
            self.attention(qkv[place.first : place.stop], turns[place.first : place.stop], *place[2:])
            for place in places
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def rotate(vectors: Tensor, turns: Tensor) -> None:
    """Rotate [n, heads, head_dim] (interleaved pairs) by complex [n, 1, head_dim / 2] in place, float32 or wider."""
    wide = vectors.float() if vectors.element_size() < 4 else vectors
    torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2)).mul_(turns)
    if wide is not vectors:
        vectors.copy_(wide)


Norm = Callable[[Tensor, Tensor, float], Tensor]
"""rms_norm(x, eps) * weight of rows x [n, size]."""


def torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference for ``compiled.rms_norm``: any dtype, device and number of rows."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def choose_norm(dtype: torch.dtype, device: torch.device) -> Norm:
    """As ``choose_operations``, a norm alone."""
    compiled = _compiled(dtype, device)
    return torch_norm if compiled is None else compiled.rms_norm


def choose_operations(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> TorchOperations:
    """Compiled operations where they apply (bfloat16 on a CPU, numba installed), else torch's."""
    compiled = _compiled(dtype, device)
    return TorchOperations(config) if compiled is None else compiled.CompiledOperations(config)


def _compiled(dtype: torch.dtype, device: torch.device) -> Any:
    """``models/compiled.py``, imported when it is first of use; ``None`` where it does not apply."""
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return None
    try:
        return importlib.import_module("outrider.models.compiled")
    except (ImportError, RuntimeError):  # no numba here, or nowhere to keep what it compiles
        return None
