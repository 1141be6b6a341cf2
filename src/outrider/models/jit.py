"""bfloat16 numbers and raw addresses inside numba functions: what the compiled loops of several modules are made of.

Numba keeps compiled loops on disk until their own file changes: after an edit here, touch the files that import this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """An integer address as an untyped pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _float_of(context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@njit(inline="always")
def load(value: Any) -> Any:
    """bfloat16 bits -> float32."""
    return _float_of(np.uint32(np.uint32(value) << np.uint32(16)))


@njit(inline="always")
def bf16_bits(value: Any) -> Any:
    """float32 -> bfloat16 bits, round to nearest even."""
    bits = _bits_of(np.float32(value))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(inline="always")
def exp(value: Any) -> Any:
    """exp in float32 without branches or calls, so that loops vectorise; relative error 8e-6 at most above -80."""
    scaled = min(max(np.float32(value) * np.float32(1.4426950408889634), np.float32(-125.0)), np.float32(125.0))
    whole = np.floor(scaled + np.float32(0.5))
    rest = (scaled - whole) * np.float32(0.6931471805599453)  # at most 0.35: six terms give float32 precision
    series = np.float32(1.0 / 720.0)
    series = series * rest + np.float32(1.0 / 120.0)
    series = series * rest + np.float32(1.0 / 24.0)
    series = series * rest + np.float32(1.0 / 6.0)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    series = series * rest + np.float32(1.0)
    return series * _float_of(np.uint32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)))
