"""Checks of a forward's arguments that every model shares: mistakes raise instead of computing something else."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.base import FINAL_HIDDEN, Segment


def check_request(
    segments: Sequence[Segment], hidden: Sequence[str | int], num_layers: int, exit_layer: int | None = None
) -> None:
    """Refuse a hidden state or exit that does not exist, and two segments that write to one cache.

    Raises:
        ValueError: naming the argument.
    """
    layers = num_layers if exit_layer is None else exit_layer
    if not 1 <= layers <= num_layers:
        raise ValueError(f"exit_layer {layers} is not one of 1 ... {num_layers}")
    for name in hidden:
        if name != FINAL_HIDDEN and not (isinstance(name, int) and 0 <= name < layers):
            raise ValueError(f"no hidden state {name!r}: give 'final' or a block from 0 to {layers - 1}")
    if len(segments) > 1 and len({id(segment.cache) for segment in segments}) != len(segments):
        raise ValueError("two segments of one forward share a cache")
