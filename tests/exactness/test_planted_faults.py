"""Mistakes that look right, planted one at a time: the enumeration must notice each (reference/systems.md, 0.2).

The faults are those of the audit (``audit/faults.py``). The same trees without a fault pass, so it is the fault that is
caught.
"""

from __future__ import annotations

import pytest

from outrider.audit.faults import CAUGHT, DETERMINISTIC, FAULTS, IID, WOR, Fault, distance, fault_distance, unchanged
from outrider.types import ProposalKind


@pytest.mark.parametrize("kind", [DETERMINISTIC, IID, WOR])
def test_without_a_fault_the_law_is_exact(kind: ProposalKind) -> None:
    assert distance(kind) < 1e-12
    assert distance(kind, unchanged) < 1e-12


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.tamper], ids=str)
def test_tampering_with_the_tree_is_caught(fault: Fault) -> None:
    assert fault_distance(fault) > CAUGHT


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.tamper], ids=str)
def test_a_wrong_verifier_is_caught(fault: Fault) -> None:
    assert fault_distance(fault) > CAUGHT
