"""Training attention against one explicit list of (step + 1) * T keys with a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.heads.build import new_config
from outrider.heads.config import AttentionConfig
from outrider.heads.rotary import Rotary
from outrider.models.toy import ToyModel
from outrider.training.batch import Batch
from outrider.training.unrolled_attention import CausalAttention, Rows, UnrolledAttention
from training.unrolled_cases import random_batch

TARGET = ToyModel(vocab_size=16)
STEPS = 4


def config(num_heads: int, num_kv_heads: int) -> AttentionConfig:
    found = new_config("eagle3", TARGET, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=4)
    assert isinstance(found, AttentionConfig)
    return found


def inputs(sizes: AttentionConfig, batch: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    widths = (sizes.num_heads * sizes.head_dim, *(2 * [sizes.num_kv_heads * sizes.head_dim]))
    size = batch.tokens.shape
    return [
        tuple(torch.randn((*size, width), generator=generator, dtype=torch.float64) for width in widths)  # type: ignore[misc]
        for _ in range(STEPS)
    ]


def explicit(sizes: AttentionConfig, batch: Batch, made: list[tuple[Tensor, Tensor, Tensor]], step: int) -> Tensor:
    """Step ``step``'s attention over the keys of all steps so far, [B, T, heads * dim]."""
    rotary = Rotary(sizes, torch.device("cpu"))
    count, length = batch.tokens.shape
    keys, values = [], []
    for i, (q, k, v) in enumerate(made[: step + 1]):
        cos, sin = rotary.at(batch.positions + i, torch.float64)
        keys.append(Rotary.turn(k.view(count, length, sizes.num_kv_heads, -1), cos, sin))
        values.append(v.view(count, length, sizes.num_kv_heads, -1))
        queries = Rotary.turn(q.view(count, length, sizes.num_heads, -1), cos, sin)
    group = sizes.num_heads // sizes.num_kv_heads
    k, v = (torch.cat(part, dim=1).repeat_interleave(group, dim=2) for part in (keys, values))
    mask = torch.zeros((count, length, (step + 1) * length), dtype=torch.bool)
    for b in range(count):
        for t in range(length):
            for s in range(t + 1):
                mask[b, t, s] = batch.documents[b, s] == batch.documents[b, t]
            for i in range(1, step + 1):
                mask[b, t, i * length + t] = True
    scores = torch.einsum("bthd,bshd->bhts", queries, k) / sizes.head_dim**0.5
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).flatten(2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2), (3, 1)])
def test_every_step_equals_explicit_attention(num_heads: int, num_kv_heads: int) -> None:
    sizes, batch = config(num_heads, num_kv_heads), random_batch(TARGET, (((3, 5), (2, 6)), ((4, 7), (1, 2))))
    made = inputs(sizes, batch)
    attention = UnrolledAttention(sizes, batch)
    everything = Rows.where(torch.ones_like(batch.answers))
    for step in range(STEPS):
        found = attention.at(step, everything)(*made[step])
        torch.testing.assert_close(found, explicit(sizes, batch, made, step))


def test_later_steps_on_some_rows_equal_those_on_all() -> None:
    sizes, batch = config(6, 2), random_batch(TARGET, (((3, 5), (2, 6)), ((4, 7), (1, 2))))
    made = inputs(sizes, batch)
    attention = UnrolledAttention(sizes, batch)
    attention.at(0, Rows.where(torch.ones_like(batch.answers)))(*made[0])
    some = Rows.where(batch.answers)
    for step in range(1, STEPS):
        found = attention.at(step, some)(*(some.take(x) for x in made[step]))
        expected = explicit(sizes, batch, made, step)
        at = some.place[batch.answers]
        torch.testing.assert_close(found.flatten(0, 1)[at], expected[batch.answers])


def test_causal_attention_sees_its_own_steps_rows_only() -> None:
    sizes, batch = config(4, 2), random_batch(TARGET, (((3, 5), (2, 6)), ((4, 7), (1, 2))))
    made = inputs(sizes, batch)
    attention = CausalAttention(sizes, batch)
    everything = Rows.where(torch.ones_like(batch.answers))
    for step in range(2):
        found = attention.at(step, everything)(*made[step])
        torch.testing.assert_close(found, explicit(sizes, batch, [made[step]], 0))


def test_rows_take_what_is_wanted_in_order_and_know_where_it_lies() -> None:
    wanted = torch.tensor([[False, True, False, True], [False, False, True, False]])
    rows = Rows.where(wanted)
    values = torch.arange(8).view(2, 4)
    taken = rows.take(values)
    assert taken[0].tolist() == [1, 3]
    assert int(taken[1, 0]) == 6
    assert taken.flatten()[rows.place[wanted]].tolist() == values[wanted].tolist()
    assert Rows.where(torch.zeros_like(wanted)).index.shape == (2, 1)
