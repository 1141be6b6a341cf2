"""The small operations between a decoder's matrix products, in torch: the reference for ``models/compiled.py``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.attention import attend
from outrider.models.config import DecoderConfig


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
            turns: complex64 [n, head_dim / 2].
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


def rotate(vectors: Tensor, turns: Tensor) -> None:
    """Rotate [n, heads, head_dim] (interleaved pairs) by complex64 [n, 1, head_dim / 2], in place, in float32."""
    wide = vectors.float()
    torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2)).mul_(turns)
    if wide is not vectors:
        vectors.copy_(wide)


def choose_operations(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> TorchOperations:
    """Compiled operations where they apply (bfloat16 on a CPU, numba installed), else torch's."""
    if device.type == "cpu" and dtype is torch.bfloat16:
        try:
            from outrider.models.compiled import CompiledOperations

            return CompiledOperations(config)
        except (ImportError, RuntimeError):  # no numba here, or nowhere to keep what it compiles
            return TorchOperations(config)
    return TorchOperations(config)
