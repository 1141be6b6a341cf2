"""Every registered verifier, on every kind of proposal that it claims to be exact for, by exact enumeration.

The trees are drawn by the production shapes and judged by the production verifiers; the law of the output tokens must
be the target's to 1e-12 in total variation. Parameters and shapes are those of the audit (``audit/exact.py``), all of
them; a new verifier or shape is covered by its line in the registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.audit.exact import (
    DETERMINISTIC,
    IID,
    MERGED_KINDS,
    OTHER_SETTINGS,
    PER_SOURCE,
    SETTINGS,
    WOR,
    Case,
    Growth,
    budget_growth,
    claimed_cases,
    drawn_growths,
    exact_row,
    merged_growths,
    other_growths,
)
from outrider.audit.law import KEPT, Source, Target, World, limits
from outrider.engine.registry import SHAPES, VERIFIERS, load_class
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.types import ProposalKind, Regime, Topology

DRAWN_KINDS = (DETERMINISTIC, IID, WOR)
OTHER_SHAPES = sorted(set(SHAPES) - {"chain", "widths"})


def assert_exact(case: Case, growths: Iterable[Growth]) -> None:
    row = exact_row(case, list(growths))
    assert row.passed, f"{case} with {row.worst}: {row.distance:.2e}"


@pytest.mark.parametrize("case", claimed_cases(DRAWN_KINDS, Topology), ids=str)
def test_law_is_the_targets(case: Case) -> None:
    assert_exact(case, drawn_growths(case))


@pytest.mark.parametrize("case", claimed_cases(DRAWN_KINDS, [Topology.TREE]), ids=str)
def test_law_with_a_node_budget(case: Case) -> None:
    """A budget that cuts the last level short must not depend on what was drawn."""
    assert_exact(case, [budget_growth(case.kind)])


@pytest.mark.parametrize("case", claimed_cases([PER_SOURCE], Topology), ids=str)
@pytest.mark.parametrize("kinds", MERGED_KINDS, ids=lambda kinds: f"{kinds[0]}-{kinds[1]}")
def test_law_of_merged_trees(case: Case, kinds: tuple[ProposalKind, ProposalKind]) -> None:
    assert_exact(case, merged_growths(case.topology, [kinds]))


@pytest.mark.parametrize("setting", OTHER_SETTINGS)
@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_law_of_other_shapes(name: str, setting: str) -> None:
    """Shapes beyond chain and widths, with default options, under every verifier that claims their proposals."""
    cls = load_class("shape", name)
    for case in claimed_cases(cls.kinds, [cls.topology], [setting]):
        growths = list(other_growths(case, [name]))
        if not growths:
            pytest.skip(f"shape {name} has an option without a default; its own tests must enumerate it")
        assert_exact(case, growths)


def test_greedy_needs_no_random_outcome() -> None:
    """At temperature 0 every verifier gives one verdict per tree, whatever the stream says."""
    where = World(*SETTINGS["greedy"])
    tree = Widths(WidthsOptions(widths=(3, 2)), DETERMINISTIC).grow(
        KEPT[-1], Source(where, DETERMINISTIC), limits(EnumeratingStream())
    )
    for name in VERIFIERS:
        if (DETERMINISTIC, Topology.TREE, Regime.GREEDY) in load_class("verifier", name).exact_for:
            verify = partial(load_class("verifier", name)().verify, tree, Target(where, tree), position=len(KEPT))
            verdicts = list(outcomes(lambda stream, verify=verify: verify(stream)))
            assert len(verdicts) == 1, name
            assert verdicts[0][1] == 1.0
