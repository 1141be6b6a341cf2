"""Tree shape -> what attention needs: the topology-aware causal mask (SpecInfer, section 4.2) and positions."""

from __future__ import annotations

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
    level = np.flatnonzero(parents < 0)
    pending = parents >= 0
    while pending.any():
        level = np.flatnonzero(pending & np.isin(parents, level))
        mask[level] |= mask[parents[level]]
        pending[level] = False
    return mask


def is_chain(parents: NDArray[np.int64]) -> bool:
    """Whether every node's parent is the node before it."""
    return bool(np.array_equal(parents, np.arange(-1, len(parents) - 1)))
