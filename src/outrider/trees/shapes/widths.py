"""Expansion <k1, k2, ...>: every leaf of level i gets k(i+1) children (SpecInfer, Miao et al. 2024, section 3.1).

One call to the draft source per level. Knows nothing of where the candidates come from.
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from outrider.trees.shapes.base import ChildSource, GrowLimits, Shape, ShapeOptions, add_children
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology

MAX_LEAVES = 4096
MAX_LEVELS = 64


class WidthsOptions(ShapeOptions):
    """Options of ``Widths``."""

    widths: Annotated[tuple[int, ...], Field(description="children of every leaf, level by level: 1,1,3,1")] = (1, 1, 3)

    @field_validator("widths", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if not isinstance(value, str):
            return (value,) if isinstance(value, int) else value
        parts = value.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise ValueError("give whole numbers separated by commas, for example 1,1,3,1")
        return tuple(int(part) for part in parts)

    @field_validator("widths")
    @classmethod
    def _limits(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not 1 <= len(value) <= MAX_LEVELS or min(value) < 1:
            raise ValueError(f"give 1 to {MAX_LEVELS} levels, each of width 1 or more")
        if math.prod(value) > MAX_LEAVES:
            raise ValueError(f"the tree would have {math.prod(value)} leaves, more than {MAX_LEAVES}: lower the widths")
        return value


class Widths(Shape):
    """A tree of fixed widths: the best candidates, or that many draws, below every leaf."""

    Options: ClassVar[type[ShapeOptions]] = WidthsOptions
    topology = Topology.TREE
    kinds = frozenset({ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT})
    positional = "widths"
    summary = "a tree of fixed widths, level by level"
    source = "SpecInfer, Miao et al. 2024, arXiv:2305.09781, section 3"

    def __init__(self, options: WidthsOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        super().__init__(options, proposal)
        self._widths = options.widths

    @property
    def size(self) -> int:
        return sum(accumulate(self._widths, mul))

    @property
    def most_children(self) -> int:
        return max(self._widths)

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        tree = TokenTree(root_token, self.proposal)
        leaves = [0]
        for width in self._widths[: limits.max_depth]:
            counts = _share(width, len(leaves), limits.max_nodes - tree.drafted)
            leaves = leaves[: len(counts)]
            if not leaves:
                break
            candidates = source.candidates(tree, leaves)
            leaves = [
                child
                for node, known, count in zip(leaves, candidates, counts, strict=True)
                for child in add_children(tree, node, known, count, source.name, limits)
            ]
        return tree


def _share(width: int, leaves: int, room: int) -> list[int]:
    """How many children each leaf may get, in order of index, so that not even distinct draws exceed ``room``.

    Fixed before anything is drawn, whatever the leaves' tokens or scores: that keeps sampled proposals unbiased.
    """
    counts = [width] * min(leaves, max(0, room) // width)
    left = room - width * len(counts)
    if len(counts) < leaves and left > 0:
        counts.append(left)
    return counts
