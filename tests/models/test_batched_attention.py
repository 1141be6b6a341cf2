"""Attention of many sequences in one call gives, bit for bit, what each sequence gives alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.models.config import DecoderConfig, RopeConfig
from outrider.models.operations import Place, TorchOperations

compiled = pytest.importorskip("outrider.models.compiled")

HEADS, KV_HEADS, DIM = 6, 2, 32
ROPE = RopeConfig()
CONFIG = DecoderConfig(
    "llama", HEADS * DIM, 64, 1, HEADS, KV_HEADS, DIM, 100, 1024, 1e-5, ROPE, ROPE, (None,), DIM**-0.5
)
OPERATIONS = {"torch": TorchOperations(CONFIG), "compiled": compiled.CompiledOperations(CONFIG)}


def some_pass(rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Place]]:
    generator = torch.Generator().manual_seed(sum(rows))
    total = sum(rows)
    qkv = torch.randn(total, HEADS + 2 * KV_HEADS, DIM, generator=generator).to(dtype)
    angles = torch.randn(total, DIM // 2, generator=generator)
    places, first = [], 0
    for number, count in enumerate(rows):
        start = 5 * number
        entries = torch.randn(2 * KV_HEADS, 64 + 16 * number, DIM, generator=generator).to(dtype)
        visible = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf) if count > 1 else None
        places.append(Place(first, first + count, entries, start, bias))
        first += count
    return qkv, torch.polar(torch.ones_like(angles), angles), places


@pytest.mark.parametrize("kind", sorted(OPERATIONS))
@pytest.mark.parametrize("rows", [[1], [1, 1, 1, 1, 1], [3, 1, 8, 1], [1, 20, 1, 1], [20, 30, 1], [20, 20]])
def test_together_as_alone(kind: str, rows: list[int]) -> None:
    operations, dtype = OPERATIONS[kind], torch.bfloat16 if kind == "compiled" else torch.float32
    qkv, turns, places = some_pass(rows, dtype)
    alone, alone_entries = [], []
    for place in places:
        mine, entries = slice(place.first, place.stop), place.entries.clone()
        alone.append(operations.attention(qkv[mine].clone(), turns[mine], entries, place.start, place.bias))
        alone_entries.append(entries)
    together = operations.attention_of_all(qkv.clone(), turns, places)
    assert torch.equal(together, torch.cat(alone))
    for place, entries in zip(places, alone_entries, strict=True):
        assert torch.equal(place.entries, entries)
