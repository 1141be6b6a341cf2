"""The best tokens of few draft rows, compiled: a dozen small tensor operations cost more than reading the logits.

For bfloat16 logits on a CPU. One pass finds the greatest logit, one the normaliser, one the tokens that may be among
the best; ``ranking.py`` calls it and is the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray
from torch import Tensor

from outrider.models.jit import exp, load, pointer

_BLOCK = 64  # tokens whose greatest logit is compared first
_FAST = {"nnan", "nsz", "arcp", "contract", "afn", "reassoc"}  # all but ninf: forbidden tokens have a logit of -inf


@njit(cache=True, fastmath=_FAST, nogil=True)
def _best_of_row(row: Any, scale: float, least_log: float, tokens: Any, values: Any) -> Any:
    """Fill in the best tokens and their log probabilities, best first; returns how many."""
    size = len(row)
    best = np.float32(-np.inf)
    for i in range(size):
        best = max(best, load(row[i]))
    if best == np.float32(-np.inf):
        return 0
    factor = np.float32(scale)
    total = np.float32(0.0)
    for i in range(size):
        total += exp((load(row[i]) - best) * factor)
    # Relative to the best logit: products of a cold request's factor and a whole logit would round by more than 1.
    log_sum = np.float32(np.log(total))
    floor = np.float32(log_sum + np.float32(least_log))
    found, most, last = 0, len(tokens), np.float32(-np.inf)  # once all places are taken, a logit must exceed the last
    for start in range(0, size, _BLOCK):
        block = row[start : start + _BLOCK]
        highest = np.float32(-np.inf)
        for i in range(len(block)):
            highest = max(highest, load(block[i]))
        if highest <= last or (highest - best) * factor < floor:
            continue
        for i in range(len(block)):
            value = load(block[i])
            # Tokens come in ascending order, so that an equal one found later stands behind.
            if value <= last or (value - best) * factor < floor:
                continue
            place = found if found < most else most - 1
            while place > 0 and values[place - 1] < value:
                values[place], tokens[place] = values[place - 1], tokens[place - 1]
                place -= 1
            values[place], tokens[place] = value, start + i
            found = min(found + 1, most)
            if found == most:
                last = values[most - 1]
    for place in range(found):
        values[place] = (values[place] - best) * factor - log_sum
    return found


@njit(cache=True, nogil=True)
def _best_of_rows(
    at: int, stride: int, size: int, scale: float, least_log: Any, tokens: Any, values: Any, found: Any
) -> None:
    for row in range(len(found)):
        logits = carray(pointer(at + row * stride * 2), size, np.uint16)
        found[row] = _best_of_row(logits, scale, least_log[row], tokens[row], values[row])


def best_of_rows(
    logits: Tensor, scale: float, k: int, least_log: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Owner, token and probability, [m] each, of the ``k`` best tokens of each row, best first, lowest token first.

    Args:
        logits: bfloat16 [rows, vocabulary], rows contiguous; multiplied by ``scale``.
        least_log: float32 [rows]: tokens of a smaller log probability are left out.
    """
    count, size = logits.shape
    k = min(k, size)
    tokens, values = np.empty((count, k), np.int64), np.empty((count, k), np.float32)
    found = np.empty(count, np.int64)
    _best_of_rows(logits.data_ptr(), logits.stride(0), size, scale, least_log, tokens, values, found)
    is_found = np.arange(k) < found[:, None]
    return np.nonzero(is_found)[0], tokens[is_found], np.exp(values[is_found].astype(np.float64))
