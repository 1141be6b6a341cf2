"""Rotary position embedding in interleaved order, as one complex multiplication.

Checkpoints store q and k rows in the half-split order (pairs i, i + d/2). Scores q.k don't depend on the order inside a
head, so the rows are permuted once at load (``interleaved_rows``) and a rotation is ``view_as_complex(x) * turn``.
Scaling rules: linear; Llama-3 (wavelength bands); YaRN (Peng et al. 2023); frequency factors from a GGUF.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.errors import UnsupportedModelError
from outrider.models.config import RopeConfig


def interleaved_rows(heads: int, head_dim: int) -> Tensor:
    """Row order [heads * head_dim] that turns half-split rows into interleaved ones."""
    half = head_dim // 2
    within = torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten()
    return (torch.arange(heads)[:, None] * head_dim + within).flatten()


class Rope:
    """Turns [positions, head_dim / 2] for one kind of layer, from a table that grows by doubling.

    ``dtype``: real type of their parts, float32 or float64.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        context_length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.frequencies, self.magnitude = rope_frequencies(config, head_dim, context_length)
        self.device = device
        self.dtype = dtype
        self._table = torch.empty((0, head_dim // 2), dtype=dtype.to_complex(), device=device)

    def turns(self, positions: Tensor, highest: int) -> Tensor:
        """Complex [n, head_dim / 2] for int64 ``positions`` [n], none above ``highest``."""
        if highest >= self._table.shape[0]:
            size = max(512, 2 * (highest + 1))
            angles = torch.arange(size, dtype=torch.float32)[:, None] * self.frequencies[None, :]
            angles = angles.to(self.dtype)
            self._table = torch.polar(torch.full_like(angles, self.magnitude), angles).to(self.device)
        return self._table.index_select(0, positions)


def rope_frequencies(config: RopeConfig, head_dim: int, context_length: int) -> tuple[Tensor, float]:
    """Angle per position, float32 [head_dim / 2], and the factor on the rotated vectors (YaRN's attention factor).

    Raises:
        UnsupportedModelError: for a scaling rule that is not implemented.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (config.theta**exponents)
    scaling = config.scaling
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default" or not scaling:
        return base, 1.0
    if kind == "linear":
        return base / _number(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(base, scaling), 1.0
    if kind == "llama3_factors":
        factors = scaling["factors"]
        if not isinstance(factors, list | tuple):
            raise UnsupportedModelError("rope factors must be a list of numbers")
        return base / torch.tensor(factors, dtype=torch.float32), 1.0
    if kind == "yarn":
        return _yarn(base, config, head_dim, context_length)
    raise UnsupportedModelError(
        f"rope scaling '{kind}' is not implemented (known: default, linear, llama3, yarn); "
        "use a transformers directory with --fallback to run it through transformers"
    )


def _number(scaling: dict[str, object], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise UnsupportedModelError(f"rope scaling needs a number for '{key}', got {value!r}")
    return float(value)


def _llama3(base: Tensor, scaling: dict[str, object]) -> Tensor:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / base
    # Long wavelengths are stretched, short ones kept, the band between them blended.
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * base / factor + blend * base


def _yarn(base: Tensor, config: RopeConfig, head_dim: int, context_length: int) -> tuple[Tensor, float]:
    scaling = config.scaling
    original = _number(scaling, "original_max_position_embeddings", float(context_length))
    factor = _number(scaling, "factor", context_length / original)
    fast, slow = _number(scaling, "beta_fast", 32.0), _number(scaling, "beta_slow", 1.0)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return frequencies, _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: dict[str, object], factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(_number(scaling, "mscale")) / scale(_number(scaling, "mscale_all_dim"))
    return scale(1.0)
