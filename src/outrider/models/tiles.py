"""Attention's two products in tiles that stay in a CPU's registers, as vector code that numba functions call.

A compiler that is given plain loops over scores adds a vector up for each of them, and fetches the mixed values anew
for each query. Here four queries meet four keys in 16 running sums, which are added up together, and four queries share
each value that is loaded. bfloat16 keys and values, float32 inside. Vectors are 16 floats wide on every machine: LLVM
splits them where registers are narrower.

Numba keeps compiled loops on disk until their own file changes: after an edit here, touch ``compiled.py``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Floats in a vector; a head's size must be a multiple of it."""
TILE = 4
"""Queries, and keys, of a tile."""

_FLOAT, _HALF, _INT = ir.FloatType(), ir.IntType(16), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INDEX = ir.IntType(32)


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _element(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, _INT(size)))


def _load_floats(builder: Any, address: Any) -> Any:
    return builder.load(_at(builder, address, _FLOATS), align=4)


def _load_halves(builder: Any, address: Any) -> Any:
    """16 bfloat16 as float32."""
    bits = builder.load(_at(builder, address, ir.VectorType(_HALF, LANES)), align=2)
    wide = ir.VectorType(_INDEX, LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), wide([16] * LANES)), _FLOATS)


def _multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(fused, [a, b, total])


def _broadcast(builder: Any, address: Any) -> Any:
    value = builder.load(_at(builder, address, _FLOAT), align=4)
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _INDEX(0))
    return _shuffle(builder, single, single, [0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INDEX, len(lanes)), lanes))


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of 16 vectors, in one vector: pairs are folded into each other four times."""
    width = LANES // 2
    while len(vectors) > 1:
        starts = range(0, 2 * LANES, 2 * width)
        low = [start + lane for start in starts for lane in range(width)]
        high = [lane + width for lane in low]
        vectors = [
            builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    return vectors[0]


@intrinsic
def score_tile(context: Any, queries_at: Any, keys_at: Any, dim: Any, scores_at: Any, stride: Any) -> Any:
    """scores[q, k] = query q . key k of four queries and four keys.

    Args:
        queries_at: address of float32 [4, dim].
        keys_at: address of the first of four successive keys, bfloat16 [dim] each.
        dim: a multiple of 16.
        scores_at: address of the first query's four scores, float32.
        stride: floats between two queries' scores.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries_at, keys_at, dim, scores_at, stride = arguments
        pairs = [(query, key) for query in range(TILE) for key in range(TILE)]
        totals = [cgutils.alloca_once(builder, _FLOATS) for _ in pairs]
        for total in totals:
            builder.store(_FLOATS([0.0] * LANES), total)
        keys = [_element(builder, keys_at, builder.mul(dim, _INT(key)), 2) for key in range(TILE)]
        rows = [_element(builder, queries_at, builder.mul(dim, _INT(query)), 4) for query in range(TILE)]
        with cgutils.for_range(builder, builder.sdiv(dim, _INT(LANES)), intp=_INT) as loop:
            offset = builder.mul(loop.index, _INT(LANES))
            wide = [_load_halves(builder, _element(builder, key, offset, 2)) for key in keys]
            asked = [_load_floats(builder, _element(builder, row, offset, 4)) for row in rows]
            for (query, key), total in zip(pairs, totals, strict=True):
                builder.store(_multiply_add(builder, asked[query], wide[key], builder.load(total)), total)
        found = _sums(builder, [builder.load(total) for total in totals])
        for query in range(TILE):
            four = _shuffle(builder, found, found, [query * TILE + key for key in range(TILE)])
            target = _element(builder, scores_at, builder.mul(stride, _INT(query)), 4)
            builder.store(four, _at(builder, target, four.type), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _mixing(chunks: int) -> Any:
    """An intrinsic: out[q] = sum over s of weights[q, s] * values[s], of four queries and ``16 * chunks`` values."""

    @intrinsic
    def mix(context: Any, weights_at: Any, stride: Any, values_at: Any, dim: Any, count: Any, out_at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights_at, stride, values_at, dim, count, out_at = arguments
            places = [(query, chunk) for query in range(TILE) for chunk in range(chunks)]
            totals = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
            for total in totals:
                builder.store(_FLOATS([0.0] * LANES), total)
            rows = [_element(builder, weights_at, builder.mul(stride, _INT(query)), 4) for query in range(TILE)]
            with cgutils.for_range(builder, count, intp=_INT) as loop:
                value_at = _element(builder, values_at, builder.mul(loop.index, dim), 2)
                values = [_load_halves(builder, builder.add(value_at, _INT(2 * LANES * c))) for c in range(chunks)]
                shares = [_broadcast(builder, _element(builder, row, loop.index, 4)) for row in rows]
                for (query, chunk), total in zip(places, totals, strict=True):
                    builder.store(_multiply_add(builder, shares[query], values[chunk], builder.load(total)), total)
            for (query, chunk), total in zip(places, totals, strict=True):
                row_at = _element(builder, out_at, builder.mul(dim, _INT(query)), 4)
                target = builder.add(row_at, _INT(4 * LANES * chunk))
                builder.store(builder.load(total), _at(builder, target, _FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return mix


MOST_CHUNKS = 4
"""Vectors of values that ``mix_wide`` takes at once: with four queries they fill 16 registers."""
mix_wide = _mixing(MOST_CHUNKS)
mix_narrow = _mixing(1)
