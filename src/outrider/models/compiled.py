"""The small operations of a decode step on a CPU, compiled: norms, and attention of few rows.

Between the matrix products a step runs hundreds of operations on a few kilobytes, where a tensor library's cost per
call exceeds the arithmetic. Here each is one numba function on raw addresses: bfloat16 in and out, float32 inside,
one thread (the products own the others). ``CompiledOperations`` leaves to torch the shapes where torch is faster.
Numba compiles once per machine and keeps the result on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from outrider.models.jit import bf16_bits, exp, load, pointer
from outrider.models.operations import Place, TorchOperations, torch_norm
from outrider.models.tiles import LANES, MOST_CHUNKS, TILE, mix_narrow, mix_wide, score_tile

_NORM_ROWS = 64
_ATTENTION_ROWS = 8
_LARGEST = 8192  # rows x entries of one sequence beyond which torch's several threads win


# Rows are taken as views and indexed by loop variables alone: numba then knows that no index is negative, and LLVM
# vectorises. Index arithmetic inside a loop costs a factor of five.


@njit(cache=True, fastmath=True, nogil=True)
def _add_norm(
    x_at: int, delta_at: int, weight_at: int, sum_at: int, out_at: int, rows: int, size: int, eps: float
) -> None:
    """sum = x + delta (skipped when ``delta_at`` is 0), out = rms_norm(sum) * weight."""
    weight = carray(pointer(weight_at), size, np.uint16)
    for row in range(rows):
        total = carray(pointer(sum_at), (rows, size), np.uint16)[row]
        out = carray(pointer(out_at), (rows, size), np.uint16)[row]
        if delta_at != 0:
            x = carray(pointer(x_at), (rows, size), np.uint16)[row]
            delta = carray(pointer(delta_at), (rows, size), np.uint16)[row]
            for i in range(size):
                total[i] = bf16_bits(load(x[i]) + load(delta[i]))
        squares = np.float32(0.0)
        for i in range(size):
            value = load(total[i])
            squares += value * value
        factor = np.float32(1.0 / np.sqrt(squares / size + eps))
        for i in range(size):
            out[i] = bf16_bits(load(total[i]) * factor * load(weight[i]))


@njit(cache=True, fastmath=True, nogil=True)
def _softmax(scores: Any) -> Any:
    """exp(score - best) in place; returns the sum."""
    best = np.float32(-3.0e38)
    for s in range(len(scores)):
        best = max(best, scores[s])
    total = np.float32(0.0)
    for s in range(len(scores)):
        weight = exp(scores[s] - best)
        scores[s] = weight
        total += weight
    return total


@njit(cache=True, fastmath=True, nogil=True)
def _hide(bias: Any, scores: Any, group: int) -> None:
    """A large penalty for entries that a row does not see: fastmath assumes finite numbers, so it is not -inf."""
    rows, total = bias.shape
    for row in range(rows):
        for member in range(group):
            hidden, mine = bias[row], scores[row * group + member]
            for s in range(total):
                mine[s] = np.float32(-1.0e30) if hidden[s] != 0 else mine[s]


@njit(cache=True, fastmath=True, nogil=True)
def _rotate(source: Any, turn: Any, target: Any, scale: float) -> None:
    """One head: interleaved pairs times complex turns, times ``scale``, as float32."""
    for j in range(len(turn) // 2):
        real, imaginary = load(source[2 * j]), load(source[2 * j + 1])
        cosine, sine = turn[2 * j], turn[2 * j + 1]
        target[2 * j] = (real * cosine - imaginary * sine) * np.float32(scale)
        target[2 * j + 1] = (real * sine + imaginary * cosine) * np.float32(scale)


@njit(cache=True, fastmath=True, nogil=True)
def _score(queries: Any, keys_at: int, total: int, scores: Any) -> None:
    """scores[r, s] = query r . key s of a multiple of four rows.

    Columns behind ``total`` are not to be used: they are of the entries behind it, up to three, which are there because
    the values stand behind the keys.
    """
    count, dim = queries.shape
    for s in range(0, total, TILE):
        for first in range(0, count, TILE):
            queries_at, scores_at = queries[first].ctypes.data, scores[first].ctypes.data + 4 * s
            score_tile(queries_at, keys_at + s * dim * 2, dim, scores_at, scores.shape[1])


@njit(cache=True, fastmath=True, nogil=True)
def _mix(weights: Any, values_at: int, total: int, mixed: Any) -> None:
    """mixed[r] = sum over s of weights[r, s] * value s, of a multiple of four rows."""
    count, dim = mixed.shape
    for first in range(0, count, TILE):
        weights_at, mixed_at = weights[first].ctypes.data, mixed[first].ctypes.data
        wide = dim - dim % (MOST_CHUNKS * LANES)
        for done in range(0, wide, MOST_CHUNKS * LANES):
            mix_wide(weights_at, weights.shape[1], values_at + 2 * done, dim, total, mixed_at + 4 * done)
        for done in range(wide, dim, LANES):
            mix_narrow(weights_at, weights.shape[1], values_at + 2 * done, dim, total, mixed_at + 4 * done)


@njit(cache=True, fastmath=True, nogil=True)
def _attention(
    qkv_at: int, turns_at: int, entries_at: int, bias_at: int, out_at: int,
    rows: int, heads: int, kv_heads: int, dim: int, capacity: int, start: int, scale: float,
) -> None:  # fmt: skip
    """One sequence's few rows; see ``TorchOperations.attention``."""
    group, total = heads // kv_heads, start + rows
    qkv = carray(pointer(qkv_at), (rows, heads + 2 * kv_heads, dim), np.uint16)
    turns = carray(pointer(turns_at), (rows, dim), np.float32)
    entries = carray(pointer(entries_at), (2 * kv_heads, capacity, dim), np.uint16)
    out = carray(pointer(out_at), (rows, heads, dim), np.uint16)
    count = -(-rows * group // TILE) * TILE  # whole tiles; rows behind the last query stay zero
    queries, mixed = np.zeros((count, dim), np.float32), np.empty((count, dim), np.float32)
    scores, shares = np.empty((count, -(-total // TILE) * TILE), np.float32), np.empty(count, np.float32)
    turned = np.empty(dim, np.float32)
    for head in range(kv_heads):
        for row in range(rows):
            _rotate(qkv[row, heads + head], turns[row], turned, 1.0)
            key, value = entries[head, start + row], entries[kv_heads + head, start + row]
            new_value = qkv[row, heads + kv_heads + head]
            for j in range(dim):
                key[j] = bf16_bits(turned[j])
                value[j] = new_value[j]
            for member in range(group):
                _rotate(qkv[row, head * group + member], turns[row], queries[row * group + member], scale)
        entry = capacity * dim * 2
        _score(queries, entries_at + head * entry, total, scores)
        if bias_at != 0:
            _hide(carray(pointer(bias_at), (rows, total), np.uint16), scores, group)
        for query in range(rows * group):
            shares[query] = np.float32(1.0) / _softmax(scores[query, :total])
        _mix(scores, entries_at + (kv_heads + head) * entry, total, mixed)
        for row in range(rows):
            for member in range(group):
                query = row * group + member
                result, mixture, share = out[row, head * group + member], mixed[query], shares[query]
                for j in range(dim):
                    result[j] = bf16_bits(mixture[j] * share)


@njit(cache=True, fastmath=True, nogil=True)
def _attention_of_many(
    qkv_at: int, turns_at: int, out_at: int, places: Any,
    heads: int, kv_heads: int, dim: int, scale: float,
) -> None:  # fmt: skip
    """``_attention`` of many sequences; a row of ``places`` is first, rows, entries_at, capacity, start, bias_at."""
    for place in places:
        first = place[0]
        _attention(
            qkv_at + first * (heads + 2 * kv_heads) * dim * 2,
            turns_at + first * dim * 4,
            place[2],
            place[5],
            out_at + first * heads * dim * 2,
            place[1], heads, kv_heads, dim, place[3], place[4], scale,
        )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight of bfloat16 rows [n, size]."""
    rows, size = x.shape
    if rows > _NORM_ROWS or not x.is_contiguous() or not x.dtype == weight.dtype == torch.bfloat16:
        return torch_norm(x, weight, eps)
    out = torch.empty_like(x)
    _add_norm(0, 0, weight.data_ptr(), x.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


class CompiledOperations(TorchOperations):
    """``TorchOperations`` for bfloat16 on a CPU, compiled where that is faster."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        if delta is None:
            return x, rms_norm(x, weight, self.config.norm_eps)
        rows, size = x.shape
        if rows > _NORM_ROWS:
            return super().add_norm(x, delta, weight)
        total, out = torch.empty_like(x), torch.empty_like(x)
        _add_norm(
            x.data_ptr(),
            delta.data_ptr(),
            weight.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            self.config.norm_eps,
        )
        return total, out

    def attention(self, qkv: Tensor, turns: Tensor, entries: Tensor, start: int, bias: Tensor | None) -> Tensor:
        config, rows = self.config, qkv.shape[0]
        if not self._is_few(rows, start):
            return super().attention(qkv, turns, entries, start, bias)
        heads, dim = config.num_heads, config.head_dim
        out = torch.empty((rows, heads * dim), dtype=qkv.dtype)
        _attention(
            qkv.data_ptr(),
            turns.data_ptr(),
            entries.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            config.num_kv_heads,
            dim,
            entries.shape[1],
            start,
            config.qk_scale,
        )
        return out

    def attention_of_all(self, qkv: Tensor, turns: Tensor, places: Sequence[Place]) -> Tensor:
        few = [place for place in places if self._is_few(place.stop - place.first, place.start)]
        if len(places) == 1 or len(few) < len(places) // 2:
            return super().attention_of_all(qkv, turns, places)
        config = self.config
        heads, dim = config.num_heads, config.head_dim
        out = torch.empty((qkv.shape[0], heads * dim), dtype=qkv.dtype)
        table = np.array([
            (first, stop - first, entries.data_ptr(), entries.shape[1], start, 0 if bias is None else bias.data_ptr())
            for first, stop, entries, start, bias in few
        ])  # fmt: skip
        _attention_of_many(
            qkv.data_ptr(), turns.data_ptr(), out.data_ptr(), table, heads, config.num_kv_heads, dim, config.qk_scale
        )
        for place in places if len(few) < len(places) else ():
            if not self._is_few(place.stop - place.first, place.start):
                mine = slice(place.first, place.stop)
                out[mine] = super().attention(qkv[mine], turns[mine], *place[2:])
        return out

    def _is_few(self, rows: int, start: int) -> bool:
        """Whether one sequence's rows are few enough for compiled attention."""
        config = self.config
        is_small = rows <= _ATTENTION_ROWS and rows * (start + rows) <= _LARGEST
        return is_small and config.attention_soft_cap is None and config.head_dim % LANES == 0
