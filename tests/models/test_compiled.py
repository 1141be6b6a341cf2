"""The compiled operations against torch's: norms and attention, chains and trees, several head sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.models.config import DecoderConfig, RopeConfig
from outrider.models.operations import TorchOperations, choose_norm, choose_operations, torch_norm
from outrider.trees.topology import ancestors_mask

compiled = pytest.importorskip("outrider.models.compiled")


def config(heads: int, kv_heads: int, dim: int) -> DecoderConfig:
    rope = RopeConfig()
    return DecoderConfig(
        "llama", heads * dim, 64, 1, heads, kv_heads, dim, 100, 1024, 1e-5, rope, rope, (None,), dim**-0.5
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 256), (6, 2, 80), (3, 1, 24)])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 40])
def test_attention_equals_float32_torch(rows: int, heads: int, kv_heads: int, dim: int, start: int) -> None:
    shape = config(heads, kv_heads, dim)
    generator = torch.Generator().manual_seed(rows * 100 + dim + start)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).bfloat16()
    angles = torch.randn(rows, dim // 2, generator=generator)
    turns = torch.polar(torch.ones_like(angles), angles)
    entries = torch.randn(2 * kv_heads, 64, dim, generator=generator).bfloat16()
    bias = None
    if rows > 1:
        parents = np.array([-1, *np.random.default_rng(rows).integers(0, np.arange(1, rows))])
        visible = torch.ones(rows, start + rows, dtype=torch.bool)
        visible[:, start:] = torch.from_numpy(ancestors_mask(parents))
        bias = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill_(~visible, -torch.inf)
    wide_entries = entries.float()
    wide_bias = None if bias is None else bias.float()
    expected = TorchOperations(shape).attention(qkv.float(), turns, wide_entries, start, wide_bias)
    got = compiled.CompiledOperations(shape).attention(qkv, turns, entries, start, bias)
    # Keys are rounded to bfloat16 in the cache and the result on the way out; nothing else is.
    torch.testing.assert_close(got.float(), expected, atol=0.03, rtol=0.02)
    torch.testing.assert_close(entries.float(), wide_entries.bfloat16().float(), atol=0.0, rtol=0.01)


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
@pytest.mark.parametrize("with_delta", [False, True])
def test_norm_equals_torch(rows: int, with_delta: bool) -> None:
    shape = replace(config(4, 4, 16), hidden_size=96)
    generator = torch.Generator().manual_seed(rows)
    x, delta = (torch.randn(rows, 96, generator=generator).bfloat16() for _ in range(2))
    weight = torch.rand(96, generator=generator).bfloat16()
    before = x.clone()
    total, out = compiled.CompiledOperations(shape).add_norm(x, delta if with_delta else None, weight)
    expected_total, expected = TorchOperations(shape).add_norm(before, delta if with_delta else None, weight)
    assert torch.equal(x, before)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(out, expected, atol=0.0, rtol=0.008)  # one bfloat16 step


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@pytest.mark.parametrize("step", [1, 2])
def test_a_norm_alone_equals_torch(rows: int, step: int) -> None:
    """Also of every other row of a larger tensor, which is not contiguous, and of rows beyond the compiled ones."""
    generator = torch.Generator().manual_seed(rows)
    x = 3 * torch.randn(rows * step, 96, generator=generator).bfloat16()[::step]
    weight = torch.rand(96, generator=generator).bfloat16()
    before = x.clone()
    out = compiled.rms_norm(x, weight, 1e-5)
    assert torch.equal(x, before)
    assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)
    wide = torch_norm(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(out, wide.bfloat16(), atol=0.0, rtol=0.008)  # one bfloat16 step
    assert compiled.rms_norm(x[:1] * 0, weight, 1.0).count_nonzero() == 0


def test_a_norms_epsilon_counts() -> None:
    x, weight = torch.full((1, 8), 0.5).bfloat16(), torch.ones(8).bfloat16()
    assert compiled.rms_norm(x, weight, 0.75).tolist() == [[0.5] * 8]


def test_no_rows_have_no_norm() -> None:
    assert compiled.rms_norm(torch.empty(0, 96).bfloat16(), torch.ones(96).bfloat16(), 1e-5).shape == (0, 96)


def test_rows_of_a_wider_tensor_are_normed_too() -> None:
    """The compiled loop reads rows one behind the other; these are not."""
    wide = torch.randn(3, 200, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = torch.rand(96, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows = wide[:, 40:136]
    assert torch.equal(compiled.rms_norm(rows, weight, 1e-5), torch_norm(rows, weight, 1e-5))


def test_only_bfloat16_norms_on_a_cpu_are_compiled() -> None:
    assert choose_norm(torch.bfloat16, torch.device("cpu")) is compiled.rms_norm
    assert choose_norm(torch.float32, torch.device("cpu")) is torch_norm
    assert choose_norm(torch.bfloat16, torch.device("cuda")) is torch_norm


def test_large_scores_and_hidden_entries_stay_finite() -> None:
    shape = config(2, 1, 16)
    qkv = torch.full((2, 4, 16), 60.0).bfloat16()
    entries = torch.full((2, 8, 16), 60.0).bfloat16()
    bias = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf], [0.0, 0.0, -torch.inf, 0.0]]).bfloat16()
    out = compiled.CompiledOperations(shape).attention(qkv, torch.ones(2, 8, dtype=torch.complex64), entries, 2, bias)
    torch.testing.assert_close(out.float(), torch.full((2, 32), 60.0))


def test_nothing_behind_the_last_entry_counts() -> None:
    """Keys come in fours; where the text ends in the middle of four, whatever lies behind it is read and not used."""
    shape = config(6, 2, 32)
    qkv = torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    turns = torch.ones(3, 16, dtype=torch.complex64)
    results = []
    for rest in (0.0, float("nan")):
        entries = torch.full((4, 40, 32), rest).bfloat16()
        entries[:, :2] = 0.5
        results.append(compiled.CompiledOperations(shape).attention(qkv.clone(), turns, entries, 2, None))
    assert torch.equal(*results)
    assert not results[0].isnan().any()


def test_only_bfloat16_on_a_cpu_is_compiled() -> None:
    shape = config(2, 1, 16)
    assert type(choose_operations(shape, torch.float32, torch.device("cpu"))) is TorchOperations
    assert type(choose_operations(shape, torch.bfloat16, torch.device("cpu"))) is not TorchOperations


def test_softmax_is_float32_exact() -> None:
    """The branch-free exponential: relative error of float32 size where a weight matters at all."""
    scores = np.linspace(-60.0, 20.0, 4001, dtype=np.float32)
    expected = np.exp(scores.astype(np.float64) - 20.0)
    got = scores.copy()
    total = compiled._softmax(got)
    np.testing.assert_allclose(got, expected, rtol=8e-6)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-5)
    hidden = np.array([0.0, -1.0e30], dtype=np.float32)
    compiled._softmax(hidden)
    assert hidden[0] == pytest.approx(1.0, abs=1e-6)
    assert hidden[1] < 1e-37
