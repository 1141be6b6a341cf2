"""The cached head: equal to the training form for chains and trees, in every variant, dtype and way of feeding it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.tiny_heads import tiny_head, unrolled
from outrider.heads.cached import CachedHead, HeadCache, pack
from outrider.heads.config import Feature
from outrider.heads.network import RecurrentNetwork
from outrider.models.linear import Int4Linear, bf16_values, packed_product, quantize_int4

CPU = torch.device("cpu")
ROWS = 9
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"fc_bias": True, "qkv_bias": True, "num_kv_heads": 4}),
    ("eagle", {"para_norm": True, "num_kv_heads": 1}),
    ("eagle3", {}),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    ("eagle3", {"fc_norm": True, "norm_output": True, "head_dim": 4}),
]
TREE = [-1, -1, 0, 0, 1, 2, 2, 4, 5, 8]
"""Parents of ten guesses; -1 is the root."""
TOKENS = [3, 7, 3, 5, 1, 9, 2, 3, 6, 4]


def inputs(network: RecurrentNetwork, dtype: torch.dtype) -> tuple[Tensor, dict[Feature, Tensor]]:
    """Embeddings of a vocabulary [20, H], and features of ``ROWS`` rows."""
    generator = torch.Generator().manual_seed(4)
    size = network.config.hidden_size
    table = torch.randn((20, size), generator=generator).to(dtype)
    features = {name: torch.randn((ROWS, size), generator=generator).to(dtype) for name in network.config.features}
    return table, features


def text() -> list[int]:
    """Tokens 0 ... ROWS: the last one is the root."""
    return [(5 * i + 2) % 20 for i in range(ROWS + 1)]


def feed(
    head: CachedHead, table: Tensor, features: dict[Feature, Tensor], sizes: list[int]
) -> tuple[HeadCache, Tensor]:
    """A cache of the text's pairs, given in chunks, and all outputs."""
    cache, start, outputs = head.new_cache(), 0, []
    for size in sizes:
        part = {name: state[start : start + size] for name, state in features.items()}
        token = table[torch.tensor(text()[start + 1 : start + 1 + size])]
        outputs.append(head.forward(cache, token, head.fuse(part), range(start, start + size)))
        cache.commit()
        start += size
    return cache, torch.cat(outputs)


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(TREE[node]), node]


def tree_mask(order: list[int]) -> NDArray[np.bool_]:
    """Which nodes each node of ``order`` sees, itself included."""
    return np.array([[other in path_to(node) for other in order] for node in order])


def grow(
    head: CachedHead, cache: HeadCache, table: Tensor, root: Tensor, batches: list[list[int]]
) -> dict[int, Tensor]:
    """Outputs of all nodes of ``TREE``, evaluated batch by batch as scratch entries."""
    outputs, before = {-1: root}, 0
    mask = tree_mask([node for batch in batches for node in batch])
    for batch in batches:
        state = torch.stack([head.network.recur(outputs[TREE[node]]) for node in batch])
        token = table[torch.tensor([TOKENS[node] for node in batch])]
        positions = [ROWS - 1 + len(path_to(node)) for node in batch]
        rows = mask[before : before + len(batch), : before + len(batch)]
        outputs |= dict(zip(batch, head.forward(cache, token, state, positions, rows), strict=True))
        before += len(batch)
    return outputs


@pytest.mark.parametrize(("method", "fields"), VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_a_chain_equals_the_training_form(
    method: str, fields: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    """However the pairs arrive; float32 is packed, so packing is compared with plain products too."""
    network = tiny_head(method, **fields)
    table, features = inputs(network, torch.float64)
    expected = unrolled(network.double(), table[torch.tensor(text())], features, 1)[0]
    logits = network.logits(expected)
    head = CachedHead(tiny_head(method, **fields), dtype, CPU)
    table, features = inputs(network, dtype)
    entries = []
    for sizes in ([ROWS], [1] * ROWS, [4, 1, 1, 3]):
        cache, found = feed(head, table, features, sizes)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(head.network.logits(found).double(), logits, atol=tolerance * 4, rtol=tolerance)
        entries.append(cache.entries[:, : cache.length])
    torch.testing.assert_close(entries[0], entries[1])
    torch.testing.assert_close(entries[0], entries[2])


@pytest.mark.parametrize(("method", "fields"), VARIANTS)
def test_tree_rows_equal_each_branch_in_training_form(method: str, fields: dict[str, Any]) -> None:
    """Invariant 3 for heads, evaluated level by level, node by node and in uneven batches."""
    network = tiny_head(method, **fields).double()
    table, features = inputs(network, torch.float64)
    expected = {}
    for leaf in range(len(TREE)):
        tokens = [*text(), *(TOKENS[node] for node in path_to(leaf))]
        steps = unrolled(network, table[torch.tensor([*tokens, *[0] * ROWS])], features, len(path_to(leaf)) + 1)
        expected[leaf] = steps[-1][ROWS - 1]
    head = CachedHead(network, torch.float64, CPU)
    cache, outputs = feed(head, table, features, [ROWS])
    committed = cache.entries[:, :ROWS].clone()
    for batches in (
        [[0, 1], [2, 3, 4], [5, 6, 7], [8], [9]],
        [[n] for n in range(10)],
        [[1], [0, 4], [2], [7, 5, 3, 6], [8], [9]],
    ):
        found = grow(head, cache, table, outputs[-1], batches)
        for node, output in expected.items():
            torch.testing.assert_close(found[node], output, atol=1e-10, rtol=1e-10)
        assert cache.scratch == len(TREE)
        cache.rollback()
        assert torch.equal(cache.entries[:, :ROWS], committed)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_bfloat16_is_near(method: str) -> None:
    exact = CachedHead(tiny_head(method), torch.float64, CPU)
    rough = CachedHead(tiny_head(method), torch.bfloat16, CPU)
    _, expected = feed(exact, *inputs(exact.network, torch.float64), [ROWS])
    _, found = feed(rough, *inputs(rough.network, torch.bfloat16), [ROWS])
    assert found.dtype is torch.bfloat16
    error = (found.double() - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.03


def test_a_row_that_sees_a_sibling_is_caught() -> None:
    """The comparison above is worth something: one wrong bit of the mask shows."""
    network = tiny_head("eagle3").double()
    head = CachedHead(network, torch.float64, CPU)
    table, features = inputs(network, torch.float64)
    cache, outputs = feed(head, table, features, [ROWS])
    right = grow(head, cache, table, outputs[-1], [[0, 1]])[1]
    cache.rollback()
    state, token = network.recur(outputs[-1])[None].expand(2, -1), table[torch.tensor(TOKENS[:2])]
    wrong = head.forward(cache, token, state, [ROWS, ROWS], np.array([[True, False], [True, True]]))[1]
    assert (right - wrong).abs().max() > 1e-3


def test_growing_keeps_every_entry() -> None:
    cache = HeadCache(torch.empty((2, 0, 2)))
    for count in (3, 300, 1, 900):
        cache.reserve(count)
        used = cache.length + cache.scratch
        numbers = torch.arange(used, used + count).float()
        cache.entries[:, used : used + count] = numbers[:, None]
        cache.scratch += count
        cache.commit()
        assert torch.equal(cache.entries[1, : cache.length, 1], torch.arange(cache.length).float())
    assert cache.length == 1204
    cache.scratch = 5
    cache.truncate(700)
    assert (cache.length, cache.scratch) == (700, 0)
    cache.truncate(900)
    assert cache.length == 700


def test_the_soft_cap_of_the_target_is_the_heads() -> None:
    rows = torch.randn((20, 12), generator=torch.Generator().manual_seed(1)) * 3
    state = torch.randn((2, 12), generator=torch.Generator().manual_seed(2))
    for prepare in (lambda network: network, lambda network: pack(network, torch.float32, CPU)):
        network = tiny_head("eagle")
        network.bind(rows, 5.0)
        logits = prepare(network).target_logits(state)
        torch.testing.assert_close(logits, 5.0 * torch.tanh(state @ rows.T / 5.0))


def test_unbound_rows_are_an_error() -> None:
    network = tiny_head("eagle")
    network.bind(None)
    with pytest.raises(ValueError, match="call bind first"):
        network.logits(torch.zeros((1, 12)))


def test_four_bit_products_are_the_rounded_weights_for_few_rows_and_many() -> None:
    """What ``pack(int4=True)`` multiplies by: 4-bit groups where the sizes allow, the full weight elsewhere."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("the 4-bit kernel needs bfloat16")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((64, 96), generator=generator)
    rows = torch.randn((9, 96), generator=generator).to(torch.bfloat16)
    expected = rows.float() @ bf16_values(quantize_int4(weight)).float().T
    made = packed_product(weight, None, torch.bfloat16, int4=True)
    for count in (1, 4, 9):
        torch.testing.assert_close(made(rows[:count]).float(), expected[:count], atol=0.25, rtol=0.02)
    assert isinstance(made, Int4Linear)
    odd = packed_product(weight[:33], None, torch.bfloat16, int4=True)
    torch.testing.assert_close(odd(rows).float(), rows.float() @ weight[:33].T, atol=0.25, rtol=0.02)


def test_a_network_drafts_for_one_cache_owner_only() -> None:
    """Its rows are reordered in place, which must not happen twice."""
    network = tiny_head("eagle3").double()
    CachedHead(network, torch.float64, CPU)
    with pytest.raises(ValueError, match="drafts already"):
        CachedHead(network, torch.float64, CPU)
