"""The audit's planted faults: the six that it must know, all caught, and the measure that would tell if one was not."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.audit import faults
from outrider.audit.faults import CAUGHT, FAULTS, FaultRow, fault_audit, fault_distance
from outrider.types import ProposalKind
from outrider.verifiers.multi_step import MultiStep

IID, WOR = ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT

REQUIRED = {
    "residual not normalised, several trials": ("ResidualNotNormalised", IID),
    "q of the wrong temperature": ("q_of_another_temperature", IID),
    "sampled children re-sorted by q": ("sort_by_q", WOR),
    "a duplicate iid draw tried once": ("try_duplicates_once", IID),
    "without replacement, q not renormalised": ("forget_exclusions", WOR),
    "a drawn child dropped for low confidence": ("drop_unlikely", IID),
}


@pytest.fixture(scope="module")
def rows() -> list[FaultRow]:
    return fault_audit()


def test_every_fault_has_a_row_and_is_caught(rows: list[FaultRow]) -> None:
    assert [(row.name, row.kind) for row in rows] == [(fault.name, fault.kind) for fault in FAULTS]
    assert [row for row in rows if not row.caught] == []


@pytest.mark.parametrize("mistake", REQUIRED)
def test_the_faults_that_must_be_there(rows: list[FaultRow], mistake: str) -> None:
    name, kind = REQUIRED[mistake]
    (row,) = [row for row in rows if (row.name, row.kind) == (name, kind)]
    assert row.distance > CAUGHT


def test_no_fault_is_listed_twice_and_each_is_explained() -> None:
    assert len({(fault.name, fault.kind) for fault in FAULTS}) == len(FAULTS)
    assert all(len(fault.description) > 10 for fault in FAULTS)
    assert all((fault.tamper is None) != (fault.verifier is MultiStep) for fault in FAULTS)


def test_a_harmless_change_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """So ``caught`` can be false: the rebuilt tree without an edit is exact."""
    harmless = dataclasses.replace(FAULTS[0], name="harmless", tamper=faults.unchanged, verifier=MultiStep)
    monkeypatch.setattr(faults, "FAULTS", (harmless,))
    (row,) = fault_audit()
    assert not row.caught
    assert row.distance == fault_distance(harmless) < 1e-12
