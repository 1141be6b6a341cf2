"""Chain and widths: what they ask the source for, where they stop, and what they may not depend on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from outrider.errors import IllegalCombinationError
from outrider.sampling.draw import Role, SeededStream
from outrider.trees.shapes.base import Candidates, GrowLimits
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology

KINDS = [ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT]
Q = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)


class FixedSource:
    """The same distribution everywhere, or one per depth; counts its calls."""

    name = "fixed"

    def __init__(self, q: Tensor | Sequence[Tensor] = Q) -> None:
        self.q = q
        self.calls: list[list[int]] = []

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        self.calls.append(list(nodes))
        by_depth = self.q if isinstance(self.q, list) else [self.q] * 99
        return [Candidates(probabilities=by_depth[tree.depths[node]]) for node in nodes]


class ScriptedSource:
    """Token lists by path, like an n-gram table; nothing is known elsewhere."""

    name = "scripted"

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known = known

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        found = [self.known.get(tuple(tree.path_tokens(node)), []) for node in nodes]
        return [Candidates(tokens, [0.5] * len(tokens)) for tokens in found]


def limits(max_nodes: int = 64, max_depth: int = 64, seed: int = 0) -> GrowLimits:
    return GrowLimits(max_nodes, max_depth, 3, SeededStream(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_chain_grows_to_its_length(kind: ProposalKind) -> None:
    source = FixedSource()
    tree = Chain(ChainOptions(length=5), kind).grow(7, source, limits())
    assert tree.tokens[0] == 7
    assert tree.parents == [-1, 0, 1, 2, 3, 4]
    assert tree.topology is Topology.CHAIN
    assert tree.kind is kind
    assert source.calls == [[0], [1], [2], [3], [4]]
    assert tree.sources[1:] == ["fixed"] * 5
    if kind is ProposalKind.DETERMINISTIC:
        assert tree.tokens[1:] == [1] * 5


@pytest.mark.parametrize(("max_nodes", "max_depth", "expected"), [(3, 64, 3), (64, 2, 2), (0, 64, 0), (64, 0, 0)])
def test_chain_respects_limits_and_asks_no_more(max_nodes: int, max_depth: int, expected: int) -> None:
    source = FixedSource()
    assert Chain(ChainOptions()).grow(0, source, limits(max_nodes, max_depth)).drafted == expected
    assert len(source.calls) == expected


def test_chain_stops_where_nothing_is_known() -> None:
    tree = Chain(ChainOptions()).grow(0, ScriptedSource({(): [4, 2], (4,): [3]}), limits())
    assert tree.tokens == [0, 4, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_chain_stop_depends_on_q_and_never_on_the_drawn_token(kind: ProposalKind) -> None:
    """A drawn token of low probability stays; a flat q stops before anything is drawn from it."""
    flat = torch.full((5,), 0.2, dtype=torch.float64)
    lengths, tokens = set(), set()
    for seed in range(60):
        tree = Chain(ChainOptions(length=4, stop=0.3), kind).grow(0, FixedSource([Q, Q, flat, Q]), limits(seed=seed))
        lengths.add(tree.drafted)
        tokens.update(tree.tokens[1:])
    assert lengths == {2}
    if kind is not ProposalKind.DETERMINISTIC:
        assert tokens == {0, 1, 2, 3, 4}


def test_chain_stop_is_strict() -> None:
    for stop, expected in ((0.4, 3), (0.41, 0), (0.0, 3), (1.0, 0)):
        assert Chain(ChainOptions(length=3, stop=stop)).grow(0, FixedSource(), limits()).drafted == expected


@pytest.mark.parametrize("kind", KINDS)
def test_widths_ask_once_per_level(kind: ProposalKind) -> None:
    source = FixedSource()
    tree = Widths(WidthsOptions(widths=(1, 2, 2)), kind).grow(0, source, limits())
    assert len(source.calls) == 3
    assert [len(nodes) for nodes in source.calls] == [tree.depths.count(d) for d in range(3)]
    assert [len(tree.trials(node)) for nodes in source.calls for node in nodes] == [
        width for width, nodes in zip((1, 2, 2), source.calls, strict=True) for _ in nodes
    ]


def test_widths_deterministic_takes_the_best() -> None:
    tree = Widths(WidthsOptions(widths=(3, 1))).grow(0, FixedSource(), limits())
    assert tree.tokens == [0, 1, 3, 2, 1, 1, 1]
    assert tree.parents == [-1, 0, 0, 0, 1, 2, 3]


def test_widths_takes_what_is_known() -> None:
    source = ScriptedSource({(): [4, 2], (2,): [3, 1, 0]})
    tree = Widths(WidthsOptions(widths=(3, 2, 2))).grow(0, source, limits())
    assert [tree.path_tokens(n) for n in range(1, len(tree))] == [[4], [2], [2, 3], [2, 1]]


def test_widths_iid_keeps_duplicates_as_trials() -> None:
    skewed = torch.tensor([0.98, 0.02], dtype=torch.float64)
    tree = Widths(WidthsOptions(widths=(4, 1)), ProposalKind.IID).grow(0, FixedSource(skewed), limits())
    assert len(tree.trials(0)) == 4
    assert len(tree.children(0)) < 4
    # A token drawn several times is one leaf: it gets the next level's children once.
    assert all(len(tree.trials(child)) == 1 for child in tree.children(0).values())


def test_widths_without_replacement_stops_at_the_support() -> None:
    q = torch.tensor([0.0, 0.7, 0.3, 0.0], dtype=torch.float64)
    tree = Widths(WidthsOptions(widths=(4,)), ProposalKind.WITHOUT_REPLACEMENT).grow(0, FixedSource(q), limits())
    assert sorted(tree.tokens[1:]) == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_nodes", range(15))
def test_widths_never_exceed_the_node_budget(kind: ProposalKind, max_nodes: int) -> None:
    shape = Widths(WidthsOptions(widths=(2, 2, 2)), kind)
    for seed in range(5):
        tree = shape.grow(0, FixedSource(), limits(max_nodes, seed=seed))
        assert tree.drafted <= max_nodes
        if kind is not ProposalKind.IID:
            assert tree.drafted == min(max_nodes, 14)


def test_a_short_budget_goes_to_the_first_nodes_whatever_their_tokens() -> None:
    """5 nodes for <2, 2, ...>: 2 + 3, so the first leaf gets two draws and the second one, for every seed."""
    for seed in range(20):
        tree = Widths(WidthsOptions(widths=(2, 2)), ProposalKind.WITHOUT_REPLACEMENT).grow(
            0, FixedSource(), limits(5, seed=seed)
        )
        assert [len(tree.trials(node)) for node in (1, 2)] == [2, 1]


def test_widths_respect_depth() -> None:
    tree = Widths(WidthsOptions(widths=(2, 1, 1, 1))).grow(0, FixedSource(), limits(max_depth=2))
    assert max(tree.depths) == 2


@pytest.mark.parametrize("kind", KINDS[1:])
def test_draws_follow_the_seed_and_keys_never_repeat(kind: ProposalKind) -> None:
    class Recording(SeededStream):
        keys: list[tuple[int, Role, int]]

        def uniform(self, position: int, role: Role, draw: int) -> float:
            self.keys.append((position, role, draw))
            return super().uniform(position, role, draw)

    trees = []
    for seed in (1, 1, 2):
        stream = Recording(seed)
        stream.keys = []
        tree = Widths(WidthsOptions(widths=(3, 2, 2)), kind).grow(0, FixedSource(), GrowLimits(64, 64, 3, stream))
        assert len(set(stream.keys)) == len(stream.keys)
        assert {key[:2] for key in stream.keys} == {(3, Role.DRAFT)}
        trees.append(tree.tokens)
    assert trees[0] == trees[1] != trees[2]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_source_without_a_distribution_cannot_be_drawn_from(kind: ProposalKind) -> None:
    with pytest.raises(ValueError, match="no distribution to draw from"):
        Widths(WidthsOptions(), kind).grow(0, ScriptedSource({(): [1]}), limits())


def test_widths_parse_text() -> None:
    assert WidthsOptions.model_validate({"widths": "1,1,3,1"}).widths == (1, 1, 3, 1)
    assert WidthsOptions.model_validate({"widths": " 2, 2"}).widths == (2, 2)
    assert WidthsOptions.model_validate({"widths": 4}).widths == (4,)
    assert WidthsOptions.model_validate({"widths": [3, 1]}).widths == (3, 1)


@pytest.mark.parametrize("value", ["", "1,,2", "a", "1;2", "-1", "0", "2,0", (), "65,64", ",".join(["1"] * 65), "1.5"])
def test_wrong_widths_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r"give|lower"):
        WidthsOptions.model_validate({"widths": value})


def test_the_largest_tree_is_allowed() -> None:
    assert WidthsOptions(widths=(64, 64)).widths == (64, 64)


@pytest.mark.parametrize("value", [{"length": 0}, {"stop": 1.1}, {"stop": -0.1}, {"lenght": 3}])
def test_wrong_chain_options_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ChainOptions.model_validate(value)


@pytest.mark.parametrize("shape", [Chain, Widths])
def test_shapes_declare_themselves(shape: type[Chain] | type[Widths]) -> None:
    assert shape.positional in shape.Options.model_fields
    assert shape.summary
    assert shape.source
    with pytest.raises(IllegalCombinationError, match="cannot make per_source"):
        shape(shape.Options(), ProposalKind.PER_SOURCE)  # type: ignore[arg-type]
