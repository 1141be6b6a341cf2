"""SpecTr's k-sequential selection: its divisor, its residual, the paper's bound, and what a wrong divisor does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.types import ProposalKind
from outrider.verifiers import k_seq
from outrider.verifiers.k_seq import KSequential, acceptance, lower_bound, rho
from outrider.verifiers.transport import optimal_acceptance
from verifiers.one_position import DEGENERATE, distance, first_token, random_pairs, row

IID = ProposalKind.IID


def lacking(p: Tensor, q: Tensor, k: int, rate: float) -> Tensor:
    """What p lacks after all acceptances at divisor ``rate``, before any rounding is clipped."""
    passed = torch.minimum(p / rate, q)
    beta = float(passed.sum())
    return p - passed * (1 - (1 - beta) ** k) / beta if beta > 0 else p


def test_the_residual_is_never_negative() -> None:
    """10,000 instances; also that rho is in its range and the residual holds what the draws leave."""
    for index, (p, q) in enumerate(random_pairs(10_000, seed=3)):
        k = 1 + index % 5
        rate = rho(p, q, k)
        rest = lacking(p, q, k, rate)
        assert 1.0 <= rate <= k
        assert float(rest.min()) > -1e-15
        refused = 1 - float(torch.minimum(p / rate, q).sum())
        assert abs(float(rest.sum()) - refused**k) < 1e-12


def test_a_smaller_divisor_overdraws() -> None:
    """rho is the smallest valid one: below it some token is emitted too often, unless no token is divided at all."""
    checked = 0
    for p, q in random_pairs(300, seed=4):
        rate = rho(p, q, 3)
        smaller = rate * (1 - 1e-4)
        is_divided = bool(((p > 0) & (p / rate < q)).any())
        if smaller >= 1.0 and is_divided:
            checked += 1
            assert float(lacking(p, q, 3, smaller).min()) < 0.0
    assert checked > 100


def test_one_draw_is_standard_rejection() -> None:
    for p, q in random_pairs(100, seed=5):
        assert rho(p, q, 1) == 1.0
        assert acceptance(p, q, 1) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)
        assert torch.equal(
            k_seq.residual(p, torch.minimum(p, q), 1).round(decimals=12), (p - q).relu().round(decimals=12)
        )


def test_the_papers_guarantee() -> None:
    """At least 1 - 1/e of the optimum, by a bound that needs no optimum."""
    for p, q in random_pairs(500, seed=6):
        for k in (1, 2, 3, 5, 8):
            optimum = optimal_acceptance(p, q, k)
            bound = lower_bound(p, q, k)
            assert acceptance(p, q, k) >= bound - 1e-9
            assert bound >= (1 - (1 - 1 / k) ** k) * optimum - 1e-12
            assert bound >= (1 - 1 / math.e) * optimum - 1e-12


@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_law_of_degenerate_pairs(name: str, k: int) -> None:
    p, q = DEGENERATE[name]
    law, _ = first_token(KSequential(), p, q, k, IID)
    assert distance(p, law) < 1e-12


def test_an_impossible_token_is_never_emitted() -> None:
    """Many draws of a nearly certain token: what is left after all failed is rounding, and must not be drawn from."""
    p, q = row(1.0, 0.0, 0.0), row(1.0 - 1e-9, 1e-9, 0.0)
    law, accepted = first_token(KSequential(), p, q, 4, IID)
    assert law.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-15)
    assert float(law[1]) == 0.0
    assert accepted == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rate", [1.0, 1.05])
def test_a_divisor_rounded_down_is_caught(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """The plausible mistake of testing min(1, p/q) for each of k draws shifts the law."""
    p, q = row(0.5, 0.3, 0.2), row(0.2, 0.3, 0.5)
    assert rho(p, q, 2) > 1.05
    monkeypatch.setattr(k_seq, "rho", lambda p, q, k: rate)
    law, _ = first_token(KSequential(), p, q, 2, IID)
    assert distance(p, law) > 1e-3


def test_draws_without_replacement_are_refused() -> None:
    with pytest.raises(ValueError, match="not independent draws"):
        first_token(KSequential(), row(0.5, 0.3, 0.2), row(0.2, 0.3, 0.5), 2, ProposalKind.WITHOUT_REPLACEMENT)
    with pytest.raises(ValueError, match="not independent draws"):
        first_token(KSequential(), row(0.5, 0.3, 0.2), row(0.2, 0.3, 0.5), 2, ProposalKind.DETERMINISTIC)
