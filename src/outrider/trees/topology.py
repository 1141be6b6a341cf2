"""Tree shape -> what attention needs: the topology-aware causal mask (SpecInfer, section 4.2) and positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def ancestors_mask(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """mask[i, j] is true when node j is node i or one of its ancestors.

    Args:
        parents: int64 [n] in topological order, -1 for roots.

    Returns:
        bool [n, n]. Built level by level: one vectorised step per tree depth, no loop over nodes.
    """
    mask: NDArray[np.bool_] = np.eye(len(parents), dtype=np.bool_)
    depths = node_depths(parents)
    by_depth = np.argsort(depths, kind="stable")
    ends = np.cumsum(np.bincount(depths)).tolist()
    for start, end in pairwise(ends):
        level = by_depth[start:end]
        mask[level] |= mask[parents[level]]
    return mask


def node_depths(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Depth of every node, int64 [n], 0 for roots: every node's ancestor pointer jumps twice as far each turn."""
    depths = (parents >= 0).astype(np.int64)
    ancestors = parents.copy()
    while (ancestors >= 0).any():
        inside = np.flatnonzero(ancestors >= 0)
        above = ancestors[inside]
        depths[inside] += depths[above]
        ancestors[inside] = ancestors[above]
    return depths


def is_chain(parents: NDArray[np.int64]) -> bool:
    """Whether every node's parent is the node before it."""
    return bool(np.array_equal(parents, np.arange(-1, len(parents) - 1)))
