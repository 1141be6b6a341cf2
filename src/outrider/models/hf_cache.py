"""The fallback's cache: buffers of our own behind a transformers ``DynamicCache``, always able to roll back.

Every layer keeps all entries, sliding ones too (their window is in the mask), so truncating to any length is possible
and memory grows with the text. Knows nothing of masks or positions' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer

from outrider.errors import CacheRollbackError
from outrider.models.base import SequenceCache

_FIRST_CAPACITY = 256


class BufferedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's entries [1, kv_heads, entries, head_dim] in buffers that grow by doubling.

    transformers' own layer copies everything at each step. ``keys`` and ``values`` are views of the buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, n, head_dim]; returns all entries. Called by the model's attention layers."""
        used, rows = self.get_seq_length(), key_states.shape[-2]
        key_buffer, value_buffer = self._reserve(key_states, value_states, used, used + rows)
        key_buffer[:, :, used : used + rows] = key_states
        value_buffer[:, :, used : used + rows] = value_states
        self.keys, self.values = key_buffer[:, :, : used + rows], value_buffer[:, :, : used + rows]
        return self.keys, self.values

    def keep(self, length: int) -> None:
        """Forget entries from ``length`` on."""
        if self._buffers is not None:
            self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def gather(self, start: int, index: Tensor) -> None:
        """Move entries ``start + index`` to ``start`` and following."""
        for buffer in self._buffers or ():
            buffer[:, :, start : start + len(index)] = buffer.index_select(2, index.to(buffer.device) + start)

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers or ())

    def _reserve(self, keys: Tensor, values: Tensor, used: int, needed: int) -> tuple[Tensor, Tensor]:
        if self._buffers is not None and needed <= self._buffers[0].shape[2]:
            return self._buffers
        capacity = _FIRST_CAPACITY if self._buffers is None else self._buffers[0].shape[2]
        while capacity < needed:
            capacity *= 2
        grown = tuple(new.new_empty((1, new.shape[1], capacity, new.shape[3])) for new in (keys, values))
        for old, buffer in zip(self._buffers or (), grown, strict=False):
            buffer[:, :, :used] = old[:, :, :used]
        self._buffers = (grown[0], grown[1])
        self.device = keys.device
        self.is_initialized = True
        return self._buffers


class TransformersCache(SequenceCache):
    """Entries of one sequence for ``models/hf.py``.

    ``dynamic`` is what the transformers model is given; ``scratch_positions`` are the absolute positions of the scratch
    entries. ``has_entries[i]`` says whether layer i stores any (a layer that shares another's entries does not).
    """

    def __init__(self, has_entries: Sequence[bool]) -> None:
        self.length = 0
        self.scratch = 0
        self.scratch_positions: list[int] = []
        self.dynamic = DynamicCache()
        self.layers = [BufferedLayer() for stored in has_entries if stored]
        unused = iter(self.layers)
        self.dynamic.layers = [next(unused) if stored else DummyLayer() for stored in has_entries]
        # Models that index beyond their configured layers must fail, not silently get a layer that we do not own.
        self.dynamic.layer_class_to_replicate = None

    def settle(self) -> None:
        """Forget what an interrupted forward or a rollback left behind the counted entries."""
        for layer in self.layers:
            layer.keep(self.length + self.scratch)
        del self.scratch_positions[self.scratch :]

    def add_scratch(self, positions: Sequence[int]) -> None:
        """Count rows that a forward has just appended."""
        self.scratch_positions.extend(positions)
        self.scratch += len(positions)

    @torch.inference_mode()
    def commit(self, slots: Sequence[int]) -> None:
        """See ``SequenceCache.commit``.

        Raises:
            ValueError: for a slot that is not a scratch entry.
        """
        if slots and not 0 <= min(slots) <= max(slots) < self.scratch:
            raise ValueError(f"commit of slots {list(slots)} but only {self.scratch} scratch entries exist")
        if list(slots) != list(range(len(slots))):
            index = torch.tensor(slots)
            for layer in self.layers:
                layer.gather(self.length, index)
        self.length += len(slots)
        self.scratch = 0
        self.settle()

    def can_truncate(self, length: int) -> bool:
        return 0 <= length <= self.length

    def truncate(self, length: int) -> None:
        if not self.can_truncate(length):
            raise CacheRollbackError(
                f"cannot go to position {length}: the cache holds {self.length} positions; prefill the missing ones"
            )
        self.length = length
        self.scratch = 0
        self.settle()

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
