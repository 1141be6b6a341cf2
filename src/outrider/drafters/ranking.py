"""Logits of many draft rows -> the best children of each row, in one batch.

What ``LogitsPipeline.ranking`` does row by row in as many passes over the vocabulary as there are parameters, for
deterministic proposals without penalties or biases, whose scores only choose guesses. One pass finds the maxima of
small blocks of logits; they bound what a row can offer, so that rows without a useful child are done, and they name the
blocks that the others' best tokens are in. The normaliser is float32. Knows no tree and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import FloatArray, RankedChildren
from outrider.types import Regime

BestOfRows = Callable[
    [Tensor, float, int, NDArray[np.float32]], tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
]
"""``ranking_compiled.best_of_rows``."""

MOST_ROWS, MOST_CHILDREN = 16, 32
"""Up to which compiled ranking is faster."""
_BLOCK = 32
"""Logits whose maximum stands for them."""
_CHUNK = 16
"""Rows normalised together: their probabilities stay in a CPU's cache."""
_COLDEST = 1e-6
"""Colder requests rank the same in float32: everything but the best tokens has probability 0."""
_FAINTEST = 80.0
"""exp of minus this is about the least float32: tokens that far below the sum have probability 0."""


def best_children(logits: Tensor, params: SamplingParams, k: int, least: FloatArray | None = None) -> RankedChildren:
    """The ``k`` best tokens of each row with their probabilities under ``params`` (temperature 1 for greedy requests).

    Args:
        logits: [rows, vocabulary], any float type.
        least: float64 [rows]: tokens that score less are not wanted.

    Returns:
        Children of score above 0. What ``top_k``, ``top_p`` and ``min_p`` exclude is left out; the other scores are not
        renormalised, so that they do not depend on ``k`` and ``least``.
    """
    is_sampled = params.regime is Regime.SAMPLED
    scale = 1.0 / max(params.temperature, _COLDEST) if is_sampled else 1.0
    count, size = logits.shape
    is_compiled = logits.dtype is torch.bfloat16 and logits.device.type == "cpu" and logits.stride(1) == 1
    if is_compiled and count <= MOST_ROWS and 0 < k <= MOST_CHILDREN and (best_of_rows := _compiled()) is not None:
        floor = np.full(count, -_FAINTEST) if least is None else np.log(np.maximum(least, np.exp(-_FAINTEST)))
        found = RankedChildren(*best_of_rows(logits, scale, k, floor.astype(np.float32)))
        return _truncated(found, params) if is_sampled else found
    logits = F.pad(logits, (0, -size % _BLOCK), value=float("-inf")) if size % _BLOCK else logits
    # Block j holds the tokens j, j + blocks, j + 2 * blocks, ...: maxima over a strided axis vectorise best.
    whole = logits.view(count, _BLOCK, -1)
    maxima = whole.amax(dim=1).float() * scale
    least_log = torch.full((count,), -torch.inf) if least is None else torch.from_numpy(least).log().float()
    least_log = least_log.to(logits.device).clamp(min=-_FAINTEST)
    useful = torch.nonzero(maxima.amax(dim=1) - torch.logsumexp(maxima, dim=1) >= least_log)[:, 0]
    maxima = maxima[useful]
    log_sum = _log_sum(whole, maxima, useful, scale)
    row, token, value = _above(whole, useful, maxima, log_sum + least_log[useful], k, scale)
    score = torch.exp(value.double() - log_sum[row].double())
    ranked = _sorted(useful[row].cpu().numpy(), token.cpu().numpy(), score.cpu().numpy(), k)
    return _truncated(ranked, params) if is_sampled else ranked


@cache
def _compiled() -> BestOfRows | None:
    """The compiled ranking of few rows, imported when it is first of use; ``None`` where numba cannot compile."""
    try:
        from outrider.drafters.ranking_compiled import best_of_rows
    except (ImportError, RuntimeError):  # no numba here, or nowhere to keep what it compiles
        return None
    return best_of_rows


def _log_sum(whole: Tensor, maxima: Tensor, rows: Tensor, scale: float) -> Tensor:
    """log of the sum of exp of the scaled logits, float32 [len(rows)], read off the best token's probability."""
    highest, best = maxima.max(dim=1)
    step = min(len(rows), _CHUNK if whole.device.type == "cpu" else len(rows))
    # One buffer, in place: fresh memory for every chunk costs more than the arithmetic.
    buffer = torch.empty((step, *whole.shape[1:]), dtype=torch.float32, device=whole.device)
    index = torch.arange(step, device=whole.device)
    log_sum = highest.clone()
    for start in range(0, len(rows), max(1, step)):
        mine = slice(start, start + step)
        chunk = buffer[: len(rows[mine])]
        chunk.copy_(whole.index_select(0, rows[mine]))
        if scale != 1.0:
            chunk.mul_(scale)
        flat = chunk.view(len(chunk), -1)
        torch.softmax(flat, dim=1, out=flat)
        log_sum[mine] -= chunk[index[: len(chunk)], :, best[mine]].amax(dim=1).log()
    return log_sum


def _above(
    whole: Tensor, rows: Tensor, maxima: Tensor, floor: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Index into ``rows``, token and scaled logit, [m] each, of all logits of at least ``floor`` [len(rows)] that may
    be among their row's ``k`` best: those are no less than the k-th greatest of its block maxima.
    """
    blocks = maxima.shape[1]
    if k < blocks:
        many = torch.nonzero((maxima >= floor[:, None]).sum(dim=1) > k)[:, 0]
        if len(many):
            floor[many] = torch.topk(maxima[many], k).values[:, -1]
    row, block = torch.nonzero(maxima >= floor[:, None], as_tuple=True)
    members = whole[rows[row], :, block].float() * scale
    pair, member = torch.nonzero(members >= floor[row, None], as_tuple=True)
    return row[pair], block[pair] + blocks * member, members[pair, member]


def _sorted(row: NDArray[np.int64], token: NDArray[np.int64], score: NDArray[np.float64], k: int) -> RankedChildren:
    """Best first within each row, the lowest token first among equals; the ``k`` best stay."""
    order = np.lexsort((token, -score, row))
    row, token, score = row[order], token[order], score[order]
    stays = np.arange(len(row)) - np.searchsorted(row, row) < k
    return RankedChildren(row[stays], token[stays], score[stays])


def _truncated(ranked: RankedChildren, params: SamplingParams) -> RankedChildren:
    """Without the tokens that a sampling parameter excludes, read off the tokens that score more."""
    owners, scores = ranked.owners, ranked.scores
    first = np.searchsorted(owners, owners)
    stays = np.ones(len(owners), dtype=np.bool_)
    if params.top_k > 0:
        stays &= np.arange(len(owners)) - first < params.top_k
    if params.top_p < 1.0:
        before = np.cumsum(scores) - scores
        stays &= before - before[first] < params.top_p
    if params.min_p > 0.0:
        stays &= scores >= params.min_p * scores[first]
    return RankedChildren(owners[stays], ranked.tokens[stays], scores[stays])
