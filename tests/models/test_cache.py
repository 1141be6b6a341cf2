"""The decoder's key/value cache on its own: growth, commits, the sliding window and memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.errors import CacheRollbackError
from outrider.models.cache import KVCache, WindowGroup
from outrider.models.config import DecoderConfig, RopeConfig

WINDOW = 16
KV_HEADS, HEAD_DIM = 2, 4


def config(windows: tuple[int | None, ...]) -> DecoderConfig:
    return DecoderConfig(
        family="gemma3",
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=10,
        context_length=10_000,
        norm_eps=1e-6,
        rope_full=RopeConfig(),
        rope_sliding=RopeConfig(),
        windows=windows,
        qk_scale=1.0,
    )


def new_cache(*windows: int | None) -> KVCache:
    return KVCache(config(windows), torch.float32, torch.device("cpu"))


def write(cache: KVCache, values: Sequence[float]) -> None:
    """Scratch entries, each filled with one number: what a forward pass does."""
    cache.reserve(len(values))
    for group in cache.groups:
        start = cache.length + cache.scratch - group.base
        for block, entries in enumerate(group.blocks):
            entries[:, start : start + len(values)] = (torch.tensor(values) + block * 0.25)[None, :, None]
    start = cache.length + cache.scratch
    cache.add_scratch(range(start, start + len(values)))


def stored(cache: KVCache, group: WindowGroup, block: int = 0) -> list[float]:
    """The numbers of a group's committed entries; all heads and dimensions agree."""
    entries: Tensor = group.entries[block, :, : cache.length - group.base] - block * 0.25
    assert bool((entries == entries[:1, :, :1]).all())
    return [float(value) for value in entries[0, :, 0]]


def test_blocks_are_grouped_by_window() -> None:
    cache = new_cache(WINDOW, None, WINDOW, 4)
    assert [group.window for group in cache.groups] == [None, 4, WINDOW]
    assert cache.place == [(2, 0), (0, 0), (2, 1), (1, 0)]


def test_growth_keeps_entries() -> None:
    cache = new_cache(None, None)
    capacities = set()
    for start in range(0, 1200, 7):
        write(cache, list(range(start, start + 7)))
        cache.commit(range(7))
        capacities.add(cache.groups[0].capacity)
    group = cache.groups[0]
    for block in (0, 1):
        assert stored(cache, group, block) == [float(value) for value in range(cache.length)]
    assert capacities == {256, 512, 1024, 2048}
    assert all(view.data_ptr() == group.entries[i].data_ptr() for i, view in enumerate(group.blocks))


def test_growth_keeps_scratch_entries() -> None:
    cache = new_cache(None, WINDOW)
    write(cache, list(range(250)))
    cache.commit(range(250))
    write(cache, [1000, 1001, 1002])
    write(cache, list(range(2000, 2400)))
    cache.commit([0, 2, 3, 402])
    assert stored(cache, cache.groups[0])[-5:] == [249, 1000, 1002, 2000, 2399]
    assert stored(cache, cache.groups[1])[-5:] == [249, 1000, 1002, 2000, 2399]


@pytest.mark.parametrize("slots", [[], [0], [0, 1, 2], [0, 2, 5], [5], [1, 2, 3], [4, 1]])
def test_commit_gathers_the_path(slots: list[int]) -> None:
    cache = new_cache(None, WINDOW, None)
    write(cache, [10, 11])
    cache.commit([0, 1])
    write(cache, [20, 21, 22, 23, 24, 25])
    cache.commit(slots)
    assert (cache.length, cache.scratch) == (2 + len(slots), 0)
    for group in cache.groups:
        for block in range(len(group.blocks)):
            assert stored(cache, group, block) == [10, 11, *(20 + slot for slot in slots)]


def test_commit_beyond_scratch_changes_nothing() -> None:
    cache = new_cache(None)
    write(cache, [1, 2])
    for slots in ([2], [0, 5], [-1]):
        with pytest.raises(ValueError, match="2 scratch entries"):
            cache.commit(slots)
    assert (cache.length, cache.scratch) == (0, 2)


def test_rolled_back_scratch_is_overwritten() -> None:
    cache = new_cache(None)
    write(cache, [1, 2, 3])
    cache.rollback()
    write(cache, [7])
    assert cache.scratch_positions == [0]
    cache.commit([0])
    assert stored(cache, cache.groups[0]) == [7]


def test_sliding_group_drops_only_what_left_the_window() -> None:
    cache = new_cache(None, WINDOW)
    full, sliding = cache.groups
    for start in range(0, 3000, 11):
        write(cache, list(range(start, start + 11)))
        cache.commit(range(11))
        assert sliding.base <= max(0, cache.length - WINDOW)
        assert stored(cache, sliding) == [float(value) for value in range(sliding.base, cache.length)]
    assert full.base == 0
    assert sliding.base > 0


def test_truncate_within_and_beyond_the_window() -> None:
    cache = new_cache(None, WINDOW)
    for start in range(0, 1000, 10):
        write(cache, list(range(start, start + 10)))
        cache.commit(range(10))
    sliding = cache.groups[1]
    lowest = sliding.base + WINDOW - 1  # the row there sees back to the first entry that is left
    assert [cache.can_truncate(length) for length in (-1, 0, lowest - 1, lowest, 1000, 1001)] == [
        *(False, False, False),
        *(True, True, False),
    ]
    with pytest.raises(CacheRollbackError, match="sliding window"):
        cache.truncate(lowest - 1)
    assert cache.length == 1000
    cache.truncate(lowest)
    assert stored(cache, cache.groups[0]) == [float(value) for value in range(lowest)]
    write(cache, [5000])
    cache.commit([0])
    assert stored(cache, sliding)[-2:] == [lowest - 1, 5000]


def test_full_attention_truncates_anywhere() -> None:
    cache = new_cache(None)
    write(cache, list(range(600)))
    cache.commit(range(600))
    cache.truncate(3)
    assert stored(cache, cache.groups[0]) == [0, 1, 2]


def test_nbytes_counts_what_is_allocated() -> None:
    cache = new_cache(None, WINDOW, None)
    assert cache.nbytes == 0
    write(cache, [1])
    one_block = 256 * 2 * KV_HEADS * HEAD_DIM * 4
    assert cache.nbytes == 3 * one_block
    half = KVCache(config((None,)), torch.bfloat16, torch.device("cpu"))
    half.reserve(1)
    assert half.nbytes == one_block // 2


@pytest.mark.parametrize("rows", [1, 40])
def test_memory_of_a_sliding_group_is_bounded(rows: int) -> None:
    """5,000 tokens through trees of ``rows`` rows, one or two of which are kept."""
    cache = new_cache(WINDOW)
    largest = 0
    while cache.length < 5000:
        write(cache, [float(cache.length)] * rows)
        cache.commit(range(min(rows, 2)))
        largest = max(largest, cache.nbytes)
    assert largest == 256 * 2 * KV_HEADS * HEAD_DIM * 4
    assert cache.groups[0].base >= 5000 - 256


def test_a_long_prompt_costs_memory_once_only() -> None:
    """After a prompt far longer than the window, a sliding group keeps its capacity but never grows again."""
    cache = new_cache(WINDOW)
    write(cache, list(range(2000)))
    cache.commit(range(2000))
    allocated = cache.nbytes
    for step in range(5000):
        write(cache, [float(step)])
        cache.commit([0])
    assert cache.nbytes == allocated
