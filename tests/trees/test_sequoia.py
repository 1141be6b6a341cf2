"""Optimal trees: against brute force over all trees, against a simulated acceptance process, and their law."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from outrider.audit.enumeration import EnumeratingStream
from outrider.audit.law import KEPT, Source, World, limits, total_variation
from outrider.engine.registry import VERIFIERS, load_class
from outrider.engine.spec import parse_part
from outrider.errors import InvalidOptionError
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.sequoia import (
    GENERIC,
    MOST_GUESSES,
    OptimalTrees,
    Sequoia,
    SequoiaOptions,
    expected_tokens,
    read_vector,
)
from outrider.trees.shapes.structure import Structure
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology

KINDS = [ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT]
VECTORS: dict[str, tuple[float, ...]] = {
    "falling": (0.55, 0.2, 0.1, 0.05),
    "not-monotone": (0.1, 0.5, 0.0, 0.3),
    "steep": (0.9, 0.01),
    "flat": (0.2, 0.2, 0.2, 0.2, 0.2),
    "generic": GENERIC,
}
OrderedTree = tuple["OrderedTree", ...]
"""A node by its children."""


@cache
def forests(nodes: int) -> list[OrderedTree]:
    """Every ordered forest of ``nodes`` nodes: 1, 1, 2, 5, 14, ... (the Catalan numbers)."""
    if nodes == 0:
        return [()]
    return [
        (first, *rest)
        for size in range(1, nodes + 1)
        for first, rest in product(forests(size - 1), forests(nodes - size))
    ]


def value(tree: OrderedTree, vector: tuple[float, ...], depth: int) -> float:
    """F by its definition, ranks beyond the vector worth nothing; 0 for a tree that is too deep."""
    if tree and depth == 0:
        return float("-inf")
    shares = [*vector, *[0.0] * len(tree)]
    return 1.0 + sum(
        value(child, vector, depth - 1) * share if share else min(0.0, value(child, vector, depth - 1))
        for child, share in zip(tree, shares, strict=False)
    )


def structure_value(structure: Structure, vector: tuple[float, ...]) -> float:
    """F as the sum over the nodes of the product of shares along the path."""
    return 1.0 + sum(float(np.prod([vector[rank] for rank in path])) for path in structure.paths())


def test_there_are_as_many_forests_as_catalan_says() -> None:
    assert [len(forests(n)) for n in range(9)] == [1, 1, 2, 5, 14, 42, 132, 429, 1430]


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize("name", VECTORS)
def test_the_program_finds_what_brute_force_finds(name: str, depth: int) -> None:
    vector = VECTORS[name]
    trees = OptimalTrees(vector, 8, depth)
    best = 1.0
    for guesses in range(1, 9):
        best = max(best, max(value(tree, vector, depth) for tree in forests(guesses)))
        structure = trees.structure(guesses, depth)
        assert trees.expected_tokens(guesses, depth) == pytest.approx(best, abs=1e-12)
        assert structure_value(structure, vector) == pytest.approx(best, abs=1e-12)
        assert structure.size <= guesses
        assert max(map(len, structure.paths())) <= depth


@pytest.mark.parametrize("name", VECTORS)
def test_expected_tokens_grow_with_budget_and_depth(name: str) -> None:
    trees = OptimalTrees(VECTORS[name], 64, 10)
    table = np.array([[trees.expected_tokens(n, d) for n in range(65)] for d in range(11)])
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()
    assert (table[0] == 1.0).all()
    assert (table[:, 0] == 1.0).all()


def test_one_table_serves_smaller_limits() -> None:
    large = OptimalTrees(GENERIC, 64, 9)
    for nodes, depth in ((1, 9), (7, 3), (20, 9), (64, 2)):
        own = OptimalTrees(GENERIC, nodes, depth)
        assert large.expected_tokens(nodes, depth) == pytest.approx(own.expected_tokens(nodes, depth), abs=1e-12)
        assert structure_value(large.structure(nodes, depth), GENERIC) == pytest.approx(
            own.expected_tokens(nodes, depth), abs=1e-12
        )


def test_one_rank_gives_a_chain() -> None:
    """Geometric series, as for plain speculative decoding; the depth limit ends it before the budget does."""
    trees = OptimalTrees((0.7,), 16, 6)
    structure = trees.structure(16, 6)
    assert structure.paths() == [(0,) * length for length in range(1, 7)]
    assert trees.expected_tokens(16, 6) == pytest.approx((1 - 0.7**7) / (1 - 0.7))
    assert Sequoia(SequoiaOptions(budget=16, depth=6, acceptance="0.7")).size == 6


def test_ranks_never_accepted_get_no_node() -> None:
    assert OptimalTrees((0.5, 0.0), 4, 1).structure(4, 1).size == 1
    assert expected_tokens((0.5, 0.0, 0.0), 4, 1) == 1.5


@pytest.mark.parametrize("name", ["falling", "not-monotone", "generic"])
def test_predicted_tokens_are_those_of_the_process(name: str) -> None:
    """Walk the tree as a verifier would, child b accepted with probability p_b: the mean is F within 4 errors."""
    vector, random = VECTORS[name], np.random.default_rng(0)
    structure = OptimalTrees(vector, 24, 6).structure(24, 6)
    chances = [*vector, 1.0 - sum(vector)]
    runs = np.array([walk(structure, random.choice(len(chances), size=8, p=chances)) for _ in range(20_000)])
    error = runs.std() / np.sqrt(len(runs))
    assert abs(runs.mean() - structure_value(structure, vector)) < 4 * error
    assert error < 0.02


def walk(structure: Structure, accepted: np.ndarray) -> int:
    """Tokens that a step keeps when the accepted child of the node at depth d is ``accepted[d]``."""
    node = tokens = 0
    for rank in accepted:
        tokens += 1
        if rank >= len(structure.children[node]):
            break
        node = structure.children[node][rank]
    return tokens


def test_large_budgets_take_seconds_at_most() -> None:
    """0.01 s for 128 guesses and 0.25 s for 1024 with 32 ranks on the development machine; a loop over y takes 30 s."""
    vector = (0.5, 0.1, *[0.01] * 30)
    start = time.perf_counter()
    trees = OptimalTrees(vector, MOST_GUESSES, 8)
    assert trees.structure(MOST_GUESSES, 8).size == MOST_GUESSES
    assert time.perf_counter() - start < 10.0


# -- options -----------------------------------------------------------------------------------------------------


def shape_of(text: str, kind: ProposalKind = ProposalKind.DETERMINISTIC) -> Sequoia:
    part = parse_part("shape", text)
    shape = part.cls(part.options, kind)
    assert isinstance(shape, Sequoia)
    return shape


def test_options_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "acceptance.json"
    file.write_text(json.dumps({"vector": [0.6, 0.2, 0.1], "model": "toy"}))
    for acceptance in ("0.6/0.2/0.1", str(file)):
        options = parse_part("shape", f"sequoia:12,depth=4,acceptance={acceptance}").options
        assert (options.budget, options.depth, options.vector) == (12, 4, (0.6, 0.2, 0.1))
        assert SequoiaOptions.model_validate(options.model_dump()) == options
    assert parse_part("shape", "sequoia").options.vector == GENERIC


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acceptance=none.json", "neither numbers like 0.6/0.2/0.1 nor a readable file"),
        ("acceptance=0.9/0.9", "sum to 1 at most"),
        ("acceptance=-0.1/0.5", "between 0 and 1"),
        ("acceptance=nan", "between 0 and 1"),
        ("acceptance=0/0", "not all 0"),
        ("0", "greater than or equal to 1"),
        ("1025", "less than or equal to 1024"),
        ("depth=0", "greater than or equal to 1"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        parse_part("shape", f"sequoia:{text}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("{}", 'holds no "vector"'),
        ('{"vector": [0.5, "a"]}', 'holds no "vector"'),
        ('{"vector": []}', "1 to 64 numbers"),
        ('{"vector": [true]}', 'holds no "vector"'),
        (json.dumps({"vector": [0.01] * 65}), "1 to 64 numbers"),
    ],
)
def test_malformed_files(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "vector.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_vector(str(file))


# -- growing -----------------------------------------------------------------------------------------------------

WORLD = World(3, SamplingParams(temperature=0.7), SamplingParams(temperature=1.6))


def grow(shape: Sequoia, world: World, stream: EnumeratingStream, nodes: int = 64, depth: int = 8) -> TokenTree:
    return shape.grow(KEPT[-1], Source(world, shape.proposal), limits(stream, nodes, depth))


def test_smaller_limits_get_their_own_optimum() -> None:
    """Not the large tree cut short: of 3 guesses the best tree is 0, 1, 0.0; of 2 it is a chain."""
    shape = shape_of("sequoia:3,acceptance=0.6/0.3/0.05")
    assert shape.structure(3, 8).paths() == [(0,), (1,), (0, 0)]
    assert shape.structure(2, 8).paths() == [(0,), (0, 0)]
    assert shape.structure(2, 1).paths() == [(0,), (1,)]
    for nodes, depth in ((1, 8), (2, 8), (3, 8), (3, 1)):
        tree = grow(shape, WORLD, EnumeratingStream(), nodes, depth)
        assert tree.drafted <= nodes
        assert max(tree.depths) <= depth
        assert tree.drafted == shape.structure(nodes, depth).size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["sequoia:4,acceptance=0.4/0.35", "sequoia:5,depth=2,acceptance=0.5/0.3/0.1"])
def test_law_is_the_targets(text: str, kind: ProposalKind) -> None:
    shape = shape_of(text, kind)
    for name, nodes in verifiers_for(kind):
        distance = total_variation(WORLD, load_class("verifier", name)(), partial(grow, shape, nodes=nodes), 4)
        assert distance < 1e-12, (name, nodes)


def verifiers_for(kind: ProposalKind) -> Iterator[tuple[str, int]]:
    for name, nodes in product(VERIFIERS, (64, 3)):
        if (kind, Topology.TREE, Regime.SAMPLED) in load_class("verifier", name).exact_for:
            yield name, nodes
