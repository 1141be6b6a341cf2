"""Rotary embedding in the checkpoints' own order (pairs i, i + d/2), for heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.heads.config import AttentionConfig
from outrider.models.config import RopeConfig
from outrider.models.rope import rope_frequencies

_FIRST_ROWS = 512


class Rotary:
    """Cosines and sines of a head's positions; those of drafting come from a table that grows by doubling."""

    def __init__(self, config: AttentionConfig, device: torch.device) -> None:
        rope = RopeConfig(config.rope_theta, dict(config.rope_scaling))
        frequencies, self._magnitude = rope_frequencies(rope, config.head_dim, config.context_length)
        self._frequencies = frequencies.to(device)
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def at(self, positions: Sequence[int] | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, head_dim] of ``positions`` [...], to multiply with heads [..., heads, head_dim]."""
        if isinstance(positions, Tensor):
            return self._compute(positions, dtype)
        cos, sin = self._table(dtype, max(positions))
        if len(positions) == 1 or isinstance(positions, range):
            near = slice(positions[0], positions[-1] + 1)
            return cos[near], sin[near]
        rows = torch.tensor(positions, device=cos.device)
        return cos.index_select(0, rows), sin.index_select(0, rows)

    def _table(self, dtype: torch.dtype, highest: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [rows, 1, head_dim] of the positions 0, 1, ... up to ``highest`` at least."""
        table = self._tables.get(dtype)
        if table is None or highest >= len(table[0]):
            size = max(_FIRST_ROWS, 2 * (highest + 1))
            rows = torch.arange(size, device=self._frequencies.device)
            table = self._tables[dtype] = self._compute(rows, dtype)
        return table

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.to(self._frequencies.device).float()[..., None, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._magnitude).to(dtype), (angles.sin() * self._magnitude).to(dtype)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads [..., heads, head_dim]."""
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + turned * sin
