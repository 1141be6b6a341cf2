"""Weight formats: each kernel against the plain product of the values that it claims to hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.models.checkpoint import GROUP, Int4Weight
from outrider.models.linear import (
    DenseLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    bf16_values,
    quantize_int4,
)

OUT, IN = 96, 64
HALF_STEP = 2.0**-8  # relative rounding of one bfloat16 result, and a margin for sums

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no oneDNN bfloat16 kernels"
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(count: int) -> Tensor:
    return draw(count, IN, seed=count).to(torch.bfloat16)


def assert_rounded(found: Tensor, rows: Tensor, values: Tensor, bias: Tensor | None = None, sums: float = 0.1) -> None:
    """``found`` is the product in higher precision, rounded to bfloat16 once, or twice where a bias is added later.

    ``sums`` allows for the kernel's partial sums, whose error is relative to the sum of the terms' magnitudes.
    """
    wanted = rows.double() @ values.double().T
    allowed = wanted.abs() + sums * (rows.double().abs() @ values.double().abs().T)
    if bias is not None:
        wanted = wanted + bias.double()
        allowed = allowed + wanted.abs()
    assert found.dtype is torch.bfloat16
    assert bool(((found.double() - wanted).abs() <= HALF_STEP * allowed).all())


def test_dense_is_the_plain_product() -> None:
    weight, bias, rows = draw(OUT, IN), draw(OUT, seed=1), draw(5, IN, seed=2)
    torch.testing.assert_close(DenseLinear(weight, bias)(rows), rows @ weight.T + bias)
    assert DenseLinear(weight).nbytes == OUT * IN * 4


@needs_bf16
@pytest.mark.parametrize("count", [1, 3, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear(count: int, has_bias: bool) -> None:
    weight = draw(OUT, IN).to(torch.bfloat16)
    bias = draw(OUT, seed=1).to(torch.bfloat16) if has_bias else None
    assert_rounded(PackedLinear(weight, bias)(rows_of(count)), rows_of(count), weight, bias)


@needs_bf16
@pytest.mark.parametrize("count", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int4_linear_multiplies_its_bf16_values(count: int, has_bias: bool) -> None:
    weight = quantize_int4(draw(OUT, IN))
    bias = draw(OUT, seed=1).to(torch.bfloat16) if has_bias else None
    # The few-rows kernel also rounds inside its sums (measured: 0.26 of the magnitudes at this size).
    assert_rounded(Int4Linear(weight, bias)(rows_of(count)), rows_of(count), bf16_values(weight), bias, sums=0.4)


@needs_bf16
def test_int4_few_and_many_rows_differ_by_rounding_only() -> None:
    linear, rows = Int4Linear(quantize_int4(draw(OUT, IN)), few=4), rows_of(4)
    few, many = linear(rows), linear.many(rows)
    assert float((few - many).abs().max()) <= 2 * HALF_STEP * float(many.abs().max())
    # Five rows take the other road: the very same numbers as the packed product.
    five = rows_of(5)
    assert torch.equal(linear(five), linear.many(five))


@needs_bf16
@pytest.mark.parametrize("minimum", [-3.0, 0.0, 7.5])
def test_bf16_values_are_what_the_int4_kernel_multiplies_by(minimum: float) -> None:
    """Rows of the identity read the kernel's weights out, element by element."""
    generator = torch.Generator().manual_seed(3)
    weight = Int4Weight(
        torch.randint(0, 16, (OUT, IN), dtype=torch.uint8, generator=generator),
        torch.rand(OUT, IN // GROUP, generator=generator) * 0.3 + 1e-3,
        torch.rand(OUT, IN // GROUP, generator=generator) + minimum,
    )
    linear, identity = Int4Linear(weight), torch.eye(IN, dtype=torch.bfloat16)
    for road in (linear, linear.many):
        found = torch.cat([road(identity[start : start + 4]) for start in range(0, IN, 4)]).T
        assert torch.equal(found, bf16_values(weight))
    gap = (bf16_values(weight).float() - weight.dequantize()).abs().max()
    largest = float(weight.dequantize().abs().max()) + 8 * float(weight.scales.max())
    assert float(gap) <= 2 * HALF_STEP * largest


@needs_bf16
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_linear(count: int, has_bias: bool) -> None:
    weight = draw(OUT, IN)
    bias = draw(OUT, seed=1).to(torch.bfloat16) if has_bias else None
    linear = Int8Linear(weight, bias)
    values = linear.codes.float() * linear.scales.float()[:, None]
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((values - weight).abs() <= step * (0.5 + 127 * HALF_STEP)).all())
    # For many rows the values themselves are rounded to bfloat16 once.
    held = values if count <= linear.few else values.to(torch.bfloat16).float()
    assert_rounded(linear(rows_of(count)), rows_of(count), held, bias)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_int4_quantisation_error_is_half_a_step(scale: float) -> None:
    weight = scale * draw(OUT, IN)
    quantised = quantize_int4(weight)
    groups = weight.view(OUT, IN // GROUP, GROUP)
    step = (groups.amax(dim=-1) - groups.amin(dim=-1)) / 15
    error = (quantised.dequantize() - weight).abs().view_as(groups).amax(dim=-1)
    assert bool((error <= step * 0.5001).all())
    assert bool((error.amax() > step.min() * 0.3).all())
    assert quantised.codes.dtype is torch.uint8
    assert int(quantised.codes.max()) == 15


def test_int4_of_a_constant_group_is_exact() -> None:
    weight = torch.full((2, IN), -0.75)
    torch.testing.assert_close(quantize_int4(weight).dequantize(), weight)


def test_int4_keeps_matrices_that_are_already_on_its_grid() -> None:
    codes = torch.arange(IN, dtype=torch.uint8).remainder(16).repeat(OUT, 1)
    weight = Int4Weight(codes, torch.full((OUT, 2), 0.25), torch.full((OUT, 2), -2.0)).dequantize()
    assert torch.equal(quantize_int4(weight).codes, codes)


def test_int4_refuses_an_input_size_that_is_no_multiple_of_the_group() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_int4(draw(4, 40))


def test_rows_of_int4_weights_are_reordered_with_their_scales() -> None:
    weight, order = quantize_int4(draw(OUT, IN)), torch.randperm(OUT, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight.rows(order).dequantize(), weight.dequantize()[order])
