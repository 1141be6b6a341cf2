"""The ancestors mask against a slow walk, on random trees."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.trees.topology import ancestors_mask, is_chain


@st.composite
def parent_arrays(draw: st.DrawFn) -> np.ndarray:
    """Topological parents of a forest of up to 40 nodes: node 0 is a root, others may be."""
    size = draw(st.integers(1, 40))
    return np.array([-1] + [draw(st.integers(-1, node - 1)) for node in range(1, size)], dtype=np.int64)


def ancestors(parents: np.ndarray, node: int) -> list[int]:
    """The node and everything above it, one parent at a time."""
    found = []
    while node >= 0:
        found.append(node)
        node = int(parents[node])
    return found


@settings(max_examples=150, deadline=None)
@given(parent_arrays())
def test_mask_is_ancestor_or_self(parents: np.ndarray) -> None:
    expected = np.zeros((len(parents), len(parents)), dtype=bool)
    for node in range(len(parents)):
        expected[node, ancestors(parents, node)] = True
    assert np.array_equal(ancestors_mask(parents), expected)


@settings(max_examples=100, deadline=None)
@given(parent_arrays())
def test_chain_means_every_row_sees_all_rows_before_it(parents: np.ndarray) -> None:
    causal = np.tri(len(parents), dtype=bool)
    assert is_chain(parents) == np.array_equal(ancestors_mask(parents), causal)


def test_chain_and_star() -> None:
    assert is_chain(np.array([-1, 0, 1, 2]))
    assert not is_chain(np.array([-1, 0, 0]))
    assert ancestors_mask(np.array([-1, 0, 0])).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, False, True],
    ]
