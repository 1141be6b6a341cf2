"""Checks of a forward's arguments that every model shares: mistakes raise instead of computing something else."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.base import FINAL_HIDDEN, FULL, Segment, Sublayers


def check_request(
    segments: Sequence[Segment], hidden: Sequence[str | int], num_layers: int, skip: Sublayers = FULL
) -> None:
    """Refuse a hidden state or sublayer that does not exist, and two segments that write to one cache.

    Raises:
        ValueError: naming the argument.
    """
    if skip and not (min(skip) >= 0 and max(skip) < 2 * num_layers and len(skip) < 2 * num_layers):
        raise ValueError(
            f"skip {sorted(skip)} must leave out some, not all, of the sublayers 0 ... {2 * num_layers - 1}"
        )
    for name in hidden:
        if name != FINAL_HIDDEN and not (isinstance(name, int) and 0 <= name < num_layers):
            raise ValueError(f"no hidden state {name!r}: give 'final' or a block from 0 to {num_layers - 1}")
    if len(segments) > 1 and len({id(segment.cache) for segment in segments}) != len(segments):
        raise ValueError("two segments of one forward share a cache")
