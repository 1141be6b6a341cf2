"""Tree attention: grouped-query attention of a few new rows over a cached prefix, under a topology-aware mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.base import Segment
from outrider.models.cache import KVCache, WindowGroup


def attention_bias(segment: Segment, group: WindowGroup, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask [n, entries] for a segment's rows over a group's entries, or ``None`` when every row sees all.

    Called once per forward and window, before the rows' entries are counted as scratch. 0 is visible, -inf is not.
    """
    cache = segment.cache
    scratch_positions = cache.scratch_positions[: cache.scratch] if isinstance(cache, KVCache) else []
    rows = len(segment.tokens)
    committed = cache.length - group.base
    entries = committed + cache.scratch + rows
    positions = segment.resolved_positions()
    is_windowed = group.window is not None and max(positions) - group.base >= group.window
    if rows == 1 and segment.mask is None and not is_windowed:
        return None
    visible = torch.ones((rows, entries), dtype=torch.bool)
    if segment.mask is None:
        visible.tril_(entries - rows)
    else:
        visible[:, committed:] = torch.from_numpy(segment.mask)
    if is_windowed and group.window is not None:
        # Tree rows share positions, so a scratch entry's position is not its slot.
        entry_positions = torch.cat(
            [torch.arange(group.base, cache.length), torch.tensor(scratch_positions + positions)]
        )
        visible &= entry_positions[None, :] > torch.tensor(positions)[:, None] - group.window
    bias = torch.zeros((rows, entries), dtype=dtype)
    return bias.masked_fill_(~visible, -torch.inf).to(device)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, soft_cap: float | None
) -> Tensor:
    """Attention of new rows over their sequence's entries.

    Args:
        queries: [n, heads, head_dim], rotated.
        keys, values: [kv_heads, entries, head_dim].
        bias: [n, entries] or None.

    Returns:
        [n, heads * head_dim].
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    # Queries that share a key head become rows of one product: no copy of keys, and few-row kernels stay busy.
    grouped = (
        queries.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, head_dim)
    )
    if bias is not None and group > 1:
        bias = bias.expand(group, -1, -1).reshape(group * rows, -1)
    if soft_cap is None:
        out = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=bias, scale=scale)
    else:
        scores = torch.matmul(grouped, keys[None].transpose(-1, -2)).float() * scale
        scores = torch.tanh(scores / soft_cap) * soft_cap
        if bias is not None:
            scores = scores + bias.float()
        out = torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values[None])
    return out.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads * head_dim)
