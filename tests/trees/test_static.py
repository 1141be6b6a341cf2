"""Static trees: the notations, the errors, what is asked of the source, limits, and the law by enumeration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream
from outrider.audit.law import KEPT, Source, World, limits, total_variation
from outrider.engine.registry import VERIFIERS, load_class
from outrider.engine.spec import parse_part
from outrider.errors import InvalidOptionError
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import Candidates, GrowLimits
from outrider.trees.shapes.sequoia import GENERIC, OptimalTrees
from outrider.trees.shapes.static import PRESETS, Static, StaticOptions
from outrider.trees.shapes.structure import Structure
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.multi_step import MultiStep

DETERMINISTIC, IID, WOR = ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT
KINDS = [DETERMINISTIC, IID, WOR]
Q = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)
MEDUSA = [[0], [0, 0], [1], [0, 1]]


class FixedSource:
    """The same distribution everywhere; records which nodes it was asked about."""

    name = "fixed"

    def __init__(self, q: Tensor = Q) -> None:
        self.q = q
        self.calls: list[list[int]] = []

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        self.calls.append(list(nodes))
        return [Candidates(probabilities=self.q) for _ in nodes]


def room(max_nodes: int = 64, max_depth: int = 64, seed: int = 0) -> GrowLimits:
    return GrowLimits(max_nodes, max_depth, 3, SeededStream(seed))


def shape_of(text: str, kind: ProposalKind = DETERMINISTIC) -> Static:
    part = parse_part("shape", f"static:{text}")
    shape = part.cls(part.options, kind)
    assert isinstance(shape, Static)
    return shape


# -- notations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "0/0.0/1/0.1",
        "0.1/1/0/0.0",  # any order
        "([0],[0,0],[1],[0,1])",
        "([[0], [0, 0], [1], [0, 1]])",
        "([(0,), (0, 0), (1,), (0, 1)])",
        "[[0],[0,0],[1],[0,1]]",
        "paths=0/0.0/1/0.1",
    ],
)
def test_every_notation_survives_the_command_line(text: str) -> None:
    options = parse_part("shape", f"static:{text}").options
    assert options.paths == "0/1/0.0/0.1"
    assert options.structure.paths() == [(0,), (1,), (0, 0), (0, 1)]
    assert StaticOptions.model_validate(options.model_dump()) == options


def test_medusa_lists_come_from_files_and_from_python(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text(json.dumps(MEDUSA))
    expected = StaticOptions.model_validate({"paths": MEDUSA})
    assert parse_part("shape", f"static:path={file}").options == expected
    assert parse_part("shape", f"static:{file}").options == expected
    assert expected.paths == "0/1/0.0/0.1"


def test_presets() -> None:
    assert {name: shape_of(name).size for name in PRESETS} == {"small_16": 16, "eagle_25": 25}
    assert StaticOptions().structure == OptimalTrees(GENERIC, 16, 8).structure(16, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0/0.1.0", "path 0.1.0 needs its parent 0.1, which is missing"),
        ("([0],[2,0])", "path 2.0 needs its parent 2, which is missing"),
        ("0/1/0", "path 0 is listed twice"),
        ("a/b", "the presets are small_16, eagle_25"),
        ("0/", "give paths of child ranks"),
        ("([0],[-1])", r"\[-1\] is not such a path"),
        ("([0],[1.5])", r"\[1.5\] is not such a path"),
        ("([0],[True])", r"\[True\] is not such a path"),
        ("([0],[x])", "this list cannot be read"),
        ("([[]])", r"\[\] is not such a path"),
        ("([])", "1 to 4096 of them"),
        ("0/4096", r"ranks from 0 to 1023"),
        ("path=missing.json", "the file cannot be read"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        parse_part("shape", f"static:{text}")


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text("[[0],")
    with pytest.raises(ValidationError, match="the file is not JSON"):
        StaticOptions.model_validate({"path": str(file)})


# -- growing -----------------------------------------------------------------------------------------------------


def test_ranks_are_those_of_the_candidates() -> None:
    """Tokens by q: 1, 3, 2, 0, 4. Ranks may have gaps: 0 and 2 below the root, 1 alone below the first child."""
    tree = shape_of("0/2/0.1").grow(7, FixedSource(), room())
    assert [tree.path_tokens(node) for node in range(1, 4)] == [[1], [2], [1, 3]]


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_a_level_and_none_for_leaves(kind: ProposalKind) -> None:
    source = FixedSource()
    tree = shape_of("0/1/0.0/0.1/0.0.0", kind).grow(7, source, room())
    assert len(source.calls) == 3
    assert source.calls[0] == [0]
    assert all(len(tree.trials(node)) > 0 for call in source.calls for node in call)


def test_a_sampled_gap_closes() -> None:
    """A draw that was made and left out would be a dropped draw, so only the number of children counts."""
    tree = shape_of("0/2/2.0", WOR).grow(7, FixedSource(), room())
    assert [len(tree.trials(node)) for node in range(3)] == [2, 0, 1]


def test_equal_draws_take_both_places() -> None:
    """One possible token: the root's 2 draws are 1 node with the 1 + 2 children of both, again one node."""
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    tree = shape_of("0/1/0.0/1.0/1.1", IID).grow(7, FixedSource(certain), room())
    assert [len(tree.trials(node)) for node in range(3)] == [2, 3, 0]
    assert tree.drafted == 2


def test_a_small_support_leaves_places_empty() -> None:
    two = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    for kind in (DETERMINISTIC, WOR):
        tree = shape_of("0/1/2/0.0/2.0/2.0.0", kind).grow(7, FixedSource(two), room())
        assert [len(tree.trials(node)) for node in range(len(tree))] == [2, 1, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRESETS)
def test_limits_hold(kind: ProposalKind, name: str) -> None:
    shape = shape_of(name, kind)
    for nodes, depth in ((1, 9), (5, 9), (9, 2), (64, 3), (64, 9), (3, 1)):
        tree = shape.grow(7, FixedSource(), room(nodes, depth))
        assert tree.drafted <= min(nodes, shape.size)
        assert max(tree.depths) <= depth
        if kind is DETERMINISTIC and (nodes, depth) in ((1, 9), (5, 9)):
            assert tree.drafted == nodes


def test_a_cut_takes_the_cheapest_places() -> None:
    structure = Structure.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
    assert structure.cut(64, 64) is structure
    assert structure.cut(3, 64).paths() == [(0,), (1,), (0, 0)]
    assert structure.cut(4, 1).paths() == [(0,), (1,), (2,)]
    assert structure.cut(0, 5).size == 0


# -- the law -----------------------------------------------------------------------------------------------------

WORLD = World(3, SamplingParams(temperature=0.7), SamplingParams(temperature=1.6))
UNEVEN = ["0/1/0.0", "0/1/1.0", "0/1/0.0/1.0/1.1", "0/0.0/0.1/0.0.0", "0/1/2/1.0"]


def grow(shape: Static, world: World, stream: EnumeratingStream, max_nodes: int = 64) -> TokenTree:
    return shape.grow(KEPT[-1], Source(world, shape.proposal), limits(stream, max_nodes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", UNEVEN)
def test_law_of_uneven_trees(text: str, kind: ProposalKind) -> None:
    """Draw indices with different numbers of children, so that merged draws meet: exact for every verifier."""
    for name in VERIFIERS:
        verifier = load_class("verifier", name)
        if (kind, Topology.TREE, Regime.SAMPLED) in verifier.exact_for:
            assert total_variation(WORLD, verifier(), partial(grow, shape_of(text, kind)), 4) < 1e-12, name


@pytest.mark.parametrize("kind", [IID, WOR])
def test_law_of_a_cut_tree(kind: ProposalKind) -> None:
    for nodes in (1, 2, 3):
        cut = partial(grow, shape_of("0/1/0.0/1.0/1.1", kind), max_nodes=nodes)
        assert total_variation(WORLD, MultiStep(), cut, 4) < 1e-12


def test_a_place_left_empty_for_its_value_is_caught() -> None:
    """Planted: the root's last draw is no trial when it is token 0. The enumerations above must see such a thing."""

    def choosy(shape: Static, world: World, stream: EnumeratingStream) -> TokenTree:
        tree = grow(shape, world, stream)
        trials = tree._trials[0]
        if len(trials) > 1 and trials[-1].token == 0:
            trials.pop()
        return tree

    assert total_variation(WORLD, MultiStep(), partial(choosy, shape_of("0/1/0.0", IID)), 3) > 0.005
