"""Every registered verifier, on every kind of proposal that it claims to be exact for, by exact enumeration.

The trees are drawn by the production shapes and judged by the production verifiers; the law of the output tokens must
be the target's to 1e-12 in total variation. A new verifier or shape is covered by its line in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
from pydantic import ValidationError

from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.audit.law import KEPT, Source, Target, World, limits, total_variation
from outrider.engine.registry import SHAPES, VERIFIERS, load_class
from outrider.sampling.params import SamplingParams
from outrider.trees.merge import merge
from outrider.trees.shapes.base import Shape
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology

DETERMINISTIC, IID = ProposalKind.DETERMINISTIC, ProposalKind.IID
WOR, PER_SOURCE = ProposalKind.WITHOUT_REPLACEMENT, ProposalKind.PER_SOURCE
TOLERANCE = 1e-12


def params(**values: object) -> SamplingParams:
    return SamplingParams.parse(**{"temperature": 0.8, **values})


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {1: 0.4}}
SETTINGS: dict[str, tuple[int, SamplingParams, SamplingParams]] = {
    "temperature": (3, params(temperature=0.7), params(temperature=0.7)),
    "draft-hotter": (3, params(temperature=0.7), params(temperature=1.6)),
    "target-top-k": (4, params(top_k=2), params()),
    "target-top-p": (3, params(top_p=0.8), params(top_p=0.9)),
    "draft-support-small": (4, params(), params(top_p=0.35)),
    "min-p": (3, params(min_p=0.4), params(min_p=0.4)),
    "penalties": (3, params(**PENALTIES), params(**PENALTIES)),
    "min-tokens": (3, params(min_tokens=4), params(min_tokens=4)),
    "greedy": (3, params(temperature=0.0), params(temperature=0.0)),
    "greedy-penalties": (3, params(temperature=0.0, **PENALTIES), params(temperature=0.0, **PENALTIES)),
    "greedy-sampled-draft": (3, params(temperature=0.0), params(temperature=1.0)),
}
CHAINS = [ChainOptions(length=1), ChainOptions(length=2), ChainOptions(length=3), ChainOptions(length=3, stop=0.5)]
SMALL_TREES = [(2,), (3,), (2, 1), (1, 2)]
LARGE_TREES = [(2, 2), (1, 1, 2), (2, 1, 1), (1, 2, 1)]
LARGE_SETTINGS = ("draft-hotter", "target-top-k", "draft-support-small", "penalties")
DRAWN_KINDS = (DETERMINISTIC, IID, WOR)


@dataclass(frozen=True)
class Case:
    """One verifier on one kind of proposal, with every tree of one topology."""

    verifier: str
    kind: ProposalKind
    topology: Topology
    setting: str

    @property
    def claimed(self) -> bool:
        regime = SETTINGS[self.setting][1].regime
        return (self.kind, self.topology, regime) in load_class("verifier", self.verifier).exact_for

    def __str__(self) -> str:
        return f"{self.verifier}-{self.kind}-{self.topology}-{self.setting}"


def cases(kinds: Iterable[ProposalKind], topologies: Iterable[Topology]) -> list[Case]:
    all_cases = (Case(*parts) for parts in product(VERIFIERS, kinds, topologies, SETTINGS))
    return [case for case in all_cases if case.claimed]


def world(setting: str) -> World:
    return World(*SETTINGS[setting])


def shapes(kind: ProposalKind, topology: Topology, setting: str) -> Iterator[tuple[str, Shape, int]]:
    """Name, shape and depth."""
    if topology is Topology.CHAIN:
        for chain in CHAINS:
            yield f"chain {chain}", Chain(chain, kind), chain.length
        return
    for widths in SMALL_TREES + (LARGE_TREES if setting in LARGE_SETTINGS else []):
        yield f"widths {widths}", Widths(WidthsOptions(widths=widths), kind), len(widths)


def grow_shape(shape: Shape, max_nodes: int, max_depth: int, where: World, stream: EnumeratingStream) -> TokenTree:
    return shape.grow(KEPT[-1], Source(where, shape.proposal), limits(stream, max_nodes, max_depth))


def grow_merged(first: Shape, second: Shape, where: World, stream: EnumeratingStream) -> TokenTree:
    """Two drafters' trees merged. Another position keeps the second one's draw keys apart, as its own stream would."""
    apart = replace(limits(stream), position=len(KEPT) + 100)
    return merge(
        first.grow(KEPT[-1], Source(where, first.proposal), limits(stream)),
        second.grow(KEPT[-1], Source(where, second.proposal, "second"), apart),
    )


@pytest.mark.parametrize("case", cases(DRAWN_KINDS, Topology), ids=str)
def test_law_is_the_targets(case: Case) -> None:
    where = world(case.setting)
    for name, shape, depth in shapes(case.kind, case.topology, case.setting):
        distance = total_variation(
            where, load_class("verifier", case.verifier)(), partial(grow_shape, shape, 64, 8), depth + 1
        )
        assert distance < TOLERANCE, f"{case} with {name}: {distance:.2e}"


@pytest.mark.parametrize("case", cases(DRAWN_KINDS, [Topology.TREE]), ids=str)
def test_law_with_a_node_budget(case: Case) -> None:
    """A budget that cuts the last level short must not depend on what was drawn."""
    shape = Widths(WidthsOptions(widths=(2, 2)), case.kind)
    distance = total_variation(
        world(case.setting), load_class("verifier", case.verifier)(), partial(grow_shape, shape, 3, 8), 3
    )
    assert distance < TOLERANCE


@pytest.mark.parametrize("case", cases([PER_SOURCE], [Topology.TREE]), ids=str)
@pytest.mark.parametrize("kinds", [(IID, IID), (WOR, IID), (DETERMINISTIC, WOR), (IID, DETERMINISTIC)], ids=str)
def test_law_of_merged_trees(case: Case, kinds: tuple[ProposalKind, ProposalKind]) -> None:
    chain = Chain(ChainOptions(length=2), kinds[1])
    for first in (Chain(ChainOptions(length=2), kinds[0]), Widths(WidthsOptions(widths=(2,)), kinds[0])):
        grow = partial(grow_merged, first, chain)
        assert total_variation(world(case.setting), load_class("verifier", case.verifier)(), grow, 3) < TOLERANCE


OTHER_SHAPES = sorted(set(SHAPES) - {"chain", "widths"})


@pytest.mark.parametrize("setting", ["draft-hotter", "greedy"])
@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_law_of_other_shapes(name: str, setting: str) -> None:
    """Shapes beyond chain and widths, with default options, under every verifier that claims their proposals."""
    shape_class = load_class("shape", name)
    try:
        options = shape_class.Options()
    except ValidationError:
        pytest.skip(f"shape {name} has an option without a default; its own tests must enumerate it")
    for verifier, kind in product(VERIFIERS, shape_class.kinds):
        case = Case(verifier, kind, shape_class.topology, setting)
        if case.claimed:
            grow = partial(grow_shape, shape_class(options, kind), 4, 2)
            assert total_variation(world(setting), load_class("verifier", verifier)(), grow, 3) < TOLERANCE, f"{case}"


def test_greedy_needs_no_random_outcome() -> None:
    """At temperature 0 every verifier gives one verdict per tree, whatever the stream says."""
    where = world("greedy")
    tree = Widths(WidthsOptions(widths=(3, 2)), DETERMINISTIC).grow(
        KEPT[-1], Source(where, DETERMINISTIC), limits(EnumeratingStream())
    )
    for name in VERIFIERS:
        if (DETERMINISTIC, Topology.TREE, Regime.GREEDY) in load_class("verifier", name).exact_for:
            verify = partial(load_class("verifier", name)().verify, tree, Target(where, tree), position=len(KEPT))
            verdicts = list(outcomes(lambda stream, verify=verify: verify(stream)))
            assert len(verdicts) == 1, name
            assert verdicts[0][1] == 1.0
