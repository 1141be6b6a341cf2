"""The exact audit reads the registry: what is registered is enumerated, and what is wrong fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import pytest

from outrider.audit.exact import (
    BRIEF_SETTINGS,
    SETTINGS,
    TOLERANCE,
    Case,
    Growth,
    claimed_cases,
    exact_audit,
    exact_row,
    growths,
)
from outrider.audit.law import KEPT
from outrider.engine.registry import SHAPES, VERIFIERS, load_class
from outrider.sampling.draw import RandomStream, Role
from outrider.trees.shapes.chain import Chain
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Exactness, TargetDistributions, Verdict, exactness
from outrider.verifiers.sample_match import SampleMatch

PAIRS = [ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT, ProposalKind.PER_SOURCE]


class ToyRight(SampleMatch):
    """One draw of the target per node, from the root down: exact whatever was proposed."""

    exact_for: ClassVar[Exactness] = exactness(PAIRS, list(Topology), list(Regime))
    summary = "toy"
    source = "none"


class ToyWrong(ToyRight):
    """Keeps the first guess whenever the target might have made it."""

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        trials = tree.trials(0)
        if trials and float(target.probabilities(0)[trials[0].token]) > 0.0:
            child = trials[0].child
            token = random.categorical(target.probabilities(child), position + 1, Role.TARGET, 0)
            return Verdict((child,), token)
        return super().verify(tree, target, random, position)


class ToyLossy(ToyWrong):
    exact_for: ClassVar[Exactness] = frozenset()
    lossy = True


@pytest.fixture
def only() -> Iterator[dict[str, str]]:
    """The registry without its verifiers; afterwards they are back in their order, which README's table follows."""
    before = dict(VERIFIERS)
    VERIFIERS.clear()
    yield VERIFIERS
    VERIFIERS.clear()
    VERIFIERS.update(before)


def test_a_new_verifier_is_picked_up(only: dict[str, str]) -> None:
    only["toy_right"] = f"{__name__}:ToyRight"
    calls: list[tuple[int, int]] = []
    rows = exact_audit(lambda done, total: calls.append((done, total)))
    assert {(row.kind, row.topology, row.setting) for row in rows} == {
        (kind, topology, setting) for kind in PAIRS for topology in Topology for setting in BRIEF_SETTINGS
    }
    assert all(row.verifier == "toy_right" and row.passed and row.distance < TOLERANCE for row in rows)
    assert all(row.trees > 0 for row in rows)
    assert calls == [(index + 1, len(rows)) for index in range(len(rows))]


def test_a_wrong_verifier_fails(only: dict[str, str]) -> None:
    """On every kind, and with the parameters of a case in its row."""
    only["toy_wrong"] = f"{__name__}:ToyWrong"
    failed = [row for row in exact_audit() if not row.passed]
    assert {row.kind for row in failed} == set(PAIRS)
    assert {row.topology for row in failed} == set(Topology)
    assert all(row.distance > 1e-3 and row.worst for row in failed)


def test_a_lossy_verifier_has_no_rows(only: dict[str, str]) -> None:
    only["toy_lossy"] = f"{__name__}:ToyLossy"
    assert exact_audit() == []


def test_every_claim_is_a_case() -> None:
    """Nothing that a registered verifier claims is passed over, thorough or not."""
    for settings in (BRIEF_SETTINGS, tuple(SETTINGS)):
        found = {
            (case.verifier, case.kind, case.topology, SETTINGS[case.setting][1].regime)
            for case in claimed_cases(ProposalKind, Topology, settings)
        }
        assert found == {(name, *claim) for name in VERIFIERS for claim in load_class("verifier", name).exact_for}


def test_brief_settings_cover_the_parameters() -> None:
    targets = [SETTINGS[name][1] for name in BRIEF_SETTINGS]
    assert any(p.temperature not in (0.0, 1.0) for p in targets)
    assert any(p.top_k for p in targets)
    assert any(p.top_p < 1.0 for p in targets)
    assert any(p.repetition_penalty != 1.0 and p.presence_penalty and p.frequency_penalty for p in targets)
    assert any(p.temperature == 0.0 for p in targets)


def test_thorough_is_more_of_the_same() -> None:
    for setting in BRIEF_SETTINGS:
        for kind in PAIRS:
            for topology in Topology:
                case = Case("multi_step", kind, topology, setting)
                brief, thorough = ({g.name for g in growths(case, flag)} for flag in (False, True))
                assert brief
                assert brief <= thorough


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"chain", "widths"}))
def test_other_registered_shapes_are_grown(name: str) -> None:
    cls = load_class("shape", name)
    if any(field.is_required() for field in cls.Options.model_fields.values()):
        pytest.skip("has an option without a default")
    for kind in cls.kinds:
        case = Case("multi_step", kind, cls.topology, "draft-hotter")
        assert name in {growth.name for growth in growths(case, thorough=False)}


def test_a_new_shape_is_picked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class ToyShape(Chain):
        pass

    monkeypatch.setitem(globals(), "ToyShape", ToyShape)
    monkeypatch.setitem(SHAPES, "toy_shape", f"{__name__}:ToyShape")
    case = Case("multi_step", ProposalKind.IID, Topology.CHAIN, "draft-hotter")
    assert "toy_shape" in [growth.name for growth in growths(case)]


def test_a_law_that_is_no_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("multi_step", ProposalKind.IID, Topology.CHAIN, "temperature")
    shapes = [Growth(name, lambda world, stream: TokenTree(KEPT[-1], ProposalKind.IID), 1) for name in ("good", "bad")]
    distances = iter([0.0, math.nan])
    monkeypatch.setattr("outrider.audit.exact.total_variation", lambda *_: next(distances))
    row = exact_row(case, shapes)
    assert not row.passed
    assert row.worst == "bad"
