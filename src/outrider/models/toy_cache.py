"""The toy model's cache: it remembers which prefix every entry was computed under, and checks each use.

A real cache holds keys and values and cannot tell a wrong branch from the right one. This one stores, for every scratch
entry, a digest of what its row saw; committing an entry behind another prefix, or an entry of a pass that skipped
sublayers, raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CacheRollbackError
from outrider.models.base import FULL, SequenceCache, Sublayers

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Entry:
    token: int
    position: int
    skip: Sublayers  # sublayers that were left out
    seen: bytes  # digest of the tokens its row saw, itself included


class ToyCache(SequenceCache):
    """Committed tokens, then scratch entries. With a ``window`` only its last ``window - 1`` entries are kept."""

    def __init__(self, window: int | None = None) -> None:
        self.length = 0
        self.scratch = 0
        self.window = window
        self._kept: IntArray = np.zeros(0, dtype=np.int64)
        self._entries: list[_Entry] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens that are still held (all of them without a window): compare with a fresh prefill."""
        return tuple(int(token) for token in self._kept)

    @property
    def nbytes(self) -> int:
        return int(self._kept.nbytes) + 8 * len(self._entries)

    def write(
        self, tokens: Sequence[int], positions: Sequence[int], mask: NDArray[np.bool_] | None, skip: Sublayers = FULL
    ) -> list[IntArray]:
        """Add scratch entries; returns for each row the tokens it sees, ordered by position, itself last.

        Raises:
            ValueError: when a row does not see exactly one entry at each position before its own.
        """
        before = self.scratch
        del self._entries[before:]
        slot_tokens = np.asarray([e.token for e in self._entries] + list(tokens), dtype=np.int64)
        slot_positions = np.asarray([e.position for e in self._entries] + list(positions), dtype=np.int64)
        if mask is None:
            mask = np.tri(len(tokens), before + len(tokens), before, dtype=np.bool_)
        if mask.shape != (len(tokens), before + len(tokens)):
            raise ValueError(f"mask of shape {mask.shape} for {len(tokens)} rows behind {before} scratch entries")
        shallow = np.asarray([not entry.skip <= skip for entry in self._entries], dtype=np.bool_)
        views: list[IntArray] = []
        for row, position in enumerate(positions):
            slots = _slots_seen(mask[row], before + row, slot_positions, self.length, position)
            if shallow[slots[slots < before]].any():
                raise ValueError(f"row {row} runs sublayers that an entry it sees has skipped")
            views.append(self._windowed(np.concatenate([self._kept, slot_tokens[slots]])))
        for token, position, view in zip(tokens, positions, views, strict=True):
            self._entries.append(_Entry(int(token), position, skip, digest(view)))
        self.scratch = before + len(tokens)
        return views

    def commit(self, slots: Sequence[int]) -> None:
        """See ``SequenceCache.commit``.

        Raises:
            ValueError: for a slot that is not a scratch entry, is out of order, was computed under another prefix or
                skipped sublayers.
        """
        for slot in slots:
            if not 0 <= slot < self.scratch:
                raise ValueError(f"slot {slot} is not one of the {self.scratch} scratch entries")
        entries = [self._entries[slot] for slot in slots]
        kept = np.concatenate([self._kept, np.asarray([entry.token for entry in entries], dtype=np.int64)])
        for index, entry in enumerate(entries):
            if entry.skip:
                raise ValueError(f"slot {slots[index]} skipped sublayers {sorted(entry.skip)} and cannot be committed")
            prefix = self._windowed(kept[: len(self._kept) + index + 1])
            if entry.position != self.length + index or entry.seen != digest(prefix):
                raise ValueError(f"slot {slots[index]} was computed under another prefix than the committed one")
        self.length += len(slots)
        self._kept = kept if self.window is None else kept[max(0, len(kept) - (self.window - 1)) :]
        self.scratch = 0

    def can_truncate(self, length: int) -> bool:
        dropped = self.length - len(self._kept)
        needed = 0 if self.window is None else max(0, length - (self.window - 1))
        return 0 <= length <= self.length and (dropped == 0 or length == self.length or dropped <= needed)

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} entries to {length}")
        if not self.can_truncate(length):
            raise CacheRollbackError(
                f"cannot go back from {self.length} to {length} entries: the sliding window of {self.window} has "
                f"dropped entries that position {length} sees; prefill again, or keep the window longer"
            )
        self._kept = self._kept[: len(self._kept) - (self.length - length)]
        self.length = length
        self.scratch = 0

    def _windowed(self, tokens: IntArray) -> IntArray:
        return tokens if self.window is None else tokens[max(0, len(tokens) - self.window) :]


def digest(tokens: IntArray) -> bytes:
    """16 bytes that identify a token sequence."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def _slots_seen(visible: NDArray[np.bool_], own: int, positions: IntArray, length: int, position: int) -> IntArray:
    """Slots that a row sees, by position; they must be one each at ``length ... position``, its own included."""
    slots = np.flatnonzero(visible)
    slots = slots[np.argsort(positions[slots], kind="stable")]
    if not visible[own] or not np.array_equal(positions[slots], np.arange(length, position + 1)):
        raise ValueError(
            f"a row at position {position} must see itself and one scratch entry at each position from {length} on; "
            f"its mask shows positions {positions[slots].tolist()}"
        )
    return slots
