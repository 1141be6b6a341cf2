"""Our key/value cache: preallocated, grown by doubling, sliced to the used length, always able to roll back.

Blocks that share a window share one tensor [blocks, 2 * kv_heads, capacity, head_dim] (keys first, then values), so a
commit is one gather per group. A sliding-window group keeps at least the last ``window`` committed entries plus every
scratch entry and drops older ones only when it runs out of room: rolling back a tree never needs what was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import CacheRollbackError
from outrider.models.base import SequenceCache
from outrider.models.config import DecoderConfig

_FIRST_CAPACITY = 256


class WindowGroup:
    """The entries of all blocks with the same window. ``base`` is the position of its first entry."""

    def __init__(
        self, window: int | None, blocks: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device
    ):
        self.window = window
        self.base = 0
        self.kv_heads = config.num_kv_heads
        self._shape = (blocks, 2 * config.num_kv_heads, config.head_dim)
        self.entries = torch.empty((blocks, self._shape[1], 0, config.head_dim), dtype=dtype, device=device)
        self.blocks: list[Tensor] = []

    @property
    def capacity(self) -> int:
        return self.entries.shape[2]

    def reserve(self, committed: int, scratch: int, rows: int) -> None:
        """Make room for ``rows`` more entries behind ``committed`` + ``scratch`` positions."""
        used = committed + scratch - self.base
        if used + rows <= self.capacity:
            return
        # A row at position p sees p - window + 1 ... p, so the first new row needs window - 1 committed entries;
        # one more is kept so that the last committed token may be taken back (a chat turn that re-sends it).
        first_needed = 0 if self.window is None else max(0, committed - self.window)
        dropped = max(0, first_needed - self.base)
        kept = self.entries[:, :, dropped:used]
        needed = used - dropped + rows
        if needed > self.capacity or dropped < self.capacity // 4:
            capacity = max(_FIRST_CAPACITY, self.capacity)
            while capacity < needed + needed // 4:
                capacity *= 2
            blocks, heads, dim = self._shape
            grown = self.entries.new_empty((blocks, heads, capacity, dim))
            grown[:, :, : used - dropped] = kept
            self.entries = grown
            self.blocks = list(grown.unbind(0))
        else:
            self.entries[:, :, : used - dropped] = kept.clone()
        self.base += dropped

    def commit(self, committed: int, slots: Sequence[int]) -> None:
        """Move scratch entries ``slots`` to the front of the scratch area."""
        if list(slots) == list(range(len(slots))):
            return
        start = committed - self.base
        index = torch.tensor(slots, device=self.entries.device) + start
        self.entries[:, :, start : start + len(slots)] = self.entries.index_select(2, index)


class KVCache(SequenceCache):
    """Entries of one sequence for ``models/decoder.py``.

    ``groups[g]`` holds the blocks of one window; ``place[i]`` is (group, index in it) for block i;
    ``scratch_positions`` are the absolute positions of the scratch entries.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        windows = sorted(set(config.windows), key=lambda w: (w is not None, w or 0))
        self.groups = [WindowGroup(w, config.windows.count(w), config, dtype, device) for w in windows]
        seen = [0] * len(windows)
        self.place: list[tuple[int, int]] = []
        self.scratch_positions: list[int] = []
        for window in config.windows:
            group = windows.index(window)
            self.place.append((group, seen[group]))
            seen[group] += 1

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` scratch entries in every group."""
        for group in self.groups:
            group.reserve(self.length, self.scratch, rows)

    def add_scratch(self, positions: Sequence[int]) -> None:
        """Count rows just written behind the scratch entries."""
        del self.scratch_positions[self.scratch :]
        self.scratch_positions.extend(positions)
        self.scratch += len(positions)

    @torch.inference_mode()
    def commit(self, slots: Sequence[int]) -> None:
        if slots and not 0 <= min(slots) <= max(slots) < self.scratch:
            raise ValueError(f"commit of slots {list(slots)} but only {self.scratch} scratch entries exist")
        for group in self.groups:
            group.commit(self.length, slots)
        self.length += len(slots)
        self.scratch = 0

    def can_truncate(self, length: int) -> bool:
        if not 0 <= length <= self.length:
            return False
        # The next row, at position ``length``, sees back to length - window + 1.
        return all(g.base == 0 or g.base <= length - (g.window or 0) + 1 for g in self.groups)

    def truncate(self, length: int) -> None:
        if not self.can_truncate(length):
            raise CacheRollbackError(
                f"cannot go back to position {length}: the cache holds {self.length} positions and a sliding window "
                "has dropped entries that position needs; start a new cache and prefill"
            )
        self.length = length
        self.scratch = 0

    @property
    def nbytes(self) -> int:
        return sum(g.entries.numel() * g.entries.element_size() for g in self.groups)
