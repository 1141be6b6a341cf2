"""Rotary embedding in the checkpoints' own order (pairs i, i + d/2), for training; drafting has ``models/rope.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.heads.config import AttentionConfig
from outrider.models.config import RopeConfig
from outrider.models.rope import rope_frequencies


class Rotary:
    """Cosines and sines of a head's positions."""

    def __init__(self, config: AttentionConfig, device: torch.device) -> None:
        rope = RopeConfig(config.rope_theta, dict(config.rope_scaling))
        frequencies, self._magnitude = rope_frequencies(rope, config.head_dim, config.context_length)
        self._frequencies = frequencies.to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, head_dim] of ``positions`` [...], to multiply with heads [..., heads, head_dim]."""
        angles = positions.to(self._frequencies.device).float()[..., None, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1).to(torch.promote_types(dtype, torch.float32))
        return (angles.cos() * self._magnitude).to(dtype), (angles.sin() * self._magnitude).to(dtype)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads [..., heads, head_dim]."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + turned * sin
