"""A recurrent head as a drafter runs it: packed products, and one layer's key/value cache.

The cache covers *pairs* (target features at row t, token t + 1) of the committed text: entry t of the cache is row t of
the text. Guesses' pairs (the head's own state, guessed token) are scratch entries behind them, always rolled back: what
stays was computed from target features. Rotary order is the checkpoints' (half-split).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.heads.config import AttentionConfig, Feature
from outrider.heads.network import RecurrentNetwork
from outrider.heads.rotary import Rotary
from outrider.models.linear import PackedLinear


@dataclass(slots=True)
class HeadCache:
    """Keys and values of one layer, [2, num_kv_heads, capacity, head_dim], grown by doubling.

    ``length`` entries are committed, ``scratch`` ones speculative.
    """

    entries: Tensor
    length: int = 0
    scratch: int = 0

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more entries."""
        used = self.length + self.scratch
        if used + rows <= self.entries.shape[2]:
            return
        capacity = max(256, self.entries.shape[2])
        while capacity < used + rows:
            capacity *= 2
        two, heads, _, dim = self.entries.shape
        grown = self.entries.new_empty((two, heads, capacity, dim))
        grown[:, :, :used] = self.entries[:, :, :used]
        self.entries = grown

    def commit(self) -> None:
        """Keep every scratch entry."""
        self.length += self.scratch
        self.scratch = 0

    def rollback(self) -> None:
        """Forget every scratch entry."""
        self.scratch = 0

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` entries."""
        self.length = min(self.length, length)
        self.scratch = 0


class CachedHead:
    """A recurrent network on its device and in its compute dtype, with attention over a ``HeadCache``.

    Args:
        network: in evaluation mode; its products are packed in place.
        dtype, device: of computation.
    """

    def __init__(self, network: RecurrentNetwork, dtype: torch.dtype, device: torch.device) -> None:
        self.network = pack(network, dtype, device)
        self.config: AttentionConfig = network.config
        self.dtype = dtype
        self.device = device
        self._rotary = Rotary(self.config, device)

    def new_cache(self) -> HeadCache:
        """An empty cache."""
        shape = (2, self.config.num_kv_heads, 0, self.config.head_dim)
        return HeadCache(torch.empty(shape, dtype=self.dtype, device=self.device))

    def fuse(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """Target hidden states [n, H] by name -> states [n, H]."""
        return self.network.fuse({name: state.to(self.dtype) for name, state in features.items()})

    def forward(
        self,
        cache: HeadCache,
        token: Tensor,
        state: Tensor,
        positions: Sequence[int],
        mask: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Run one step for n pairs and write their entries to scratch slots.

        Args:
            token, state: [n, H].
            positions: of the pairs: the row of the feature, [n].
            mask: bool [n, scratch_before + n], which scratch entries and rows each row sees; ``None`` is causal. The
                committed entries are always visible.

        Returns:
            Outputs [n, H].
        """
        rows = len(positions)
        cache.reserve(rows)
        start = cache.length + cache.scratch
        bias = _bias(cache, rows, mask, self.dtype, self.device)
        cos, sin = self._rotary.at(positions, self.dtype)
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q = self._rotary.turn(queries.view(rows, heads, dim), cos, sin)
            cache.entries[0, :, start : start + rows] = self._rotary.turn(
                keys.view(rows, kv_heads, dim), cos, sin
            ).transpose(0, 1)
            cache.entries[1, :, start : start + rows] = values.view(rows, kv_heads, dim).transpose(0, 1)
            known = cache.entries[:, :, : start + rows]
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], known[0][None], known[1][None], attn_mask=bias, enable_gqa=True
            )
            return out[0].transpose(0, 1).reshape(rows, heads * dim)

        output = self.network.step(token=token, state=state, attend=attend)
        cache.scratch += rows
        return output


def _bias(
    cache: HeadCache, rows: int, mask: NDArray[np.bool_] | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask [rows, entries], ``None`` when every row sees all."""
    if rows == 1 and mask is None:
        return None
    total = cache.length + cache.scratch + rows
    visible = torch.ones((rows, total), dtype=torch.bool)
    if mask is None:
        visible.tril_(total - rows)
    else:
        visible[:, cache.length :] = torch.from_numpy(mask)
    return torch.zeros((rows, total), dtype=dtype).masked_fill_(~visible, -torch.inf).to(device)


class _Packed(nn.Module):
    """A product with its weight in oneDNN's layout."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._product = PackedLinear(linear.weight.detach(), linear.bias, dtype)
        self._out = linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], self._out)


def pack(network: RecurrentNetwork, dtype: torch.dtype, device: torch.device) -> RecurrentNetwork:
    """The network in ``dtype`` on ``device``; on a CPU its products are prepacked."""
    network.to(device, dtype)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        _pack_children(network, dtype)
    return network


def _pack_children(module: nn.Module, dtype: torch.dtype) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _Packed(child, dtype))
        else:
            _pack_children(child, dtype)
