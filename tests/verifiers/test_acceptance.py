"""The acceptance figures against the production verifiers by enumeration, and the order that they must have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.types import ProposalKind
from outrider.verifiers import acceptance
from outrider.verifiers.base import Verifier
from outrider.verifiers.k_seq import KSequential
from outrider.verifiers.multi_step import MultiStep
from outrider.verifiers.optimal_transport import OptimalTransport
from outrider.verifiers.sample_match import SampleMatch
from outrider.verifiers.swor import SamplingWithoutReplacement
from verifiers.one_position import DEGENERATE, Pair, distance, first_token, random_pairs

DETERMINISTIC, IID, WOR = ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT
PAIRS = [*DEGENERATE.values(), *random_pairs(12, seed=5)]
Figure = Callable[[Tensor, Tensor, int], float]

# The solver's own tolerance stands between the program's value and the closed form.
FIGURES: dict[str, tuple[Figure, Verifier, ProposalKind, float]] = {
    "multi_step": (acceptance.multi_step, MultiStep(), IID, 1e-12),
    "k_seq": (acceptance.k_sequential, KSequential(), IID, 1e-12),
    "optimal_transport": (acceptance.optimal, OptimalTransport(), IID, 1e-6),
    "swor": (acceptance.without_replacement, SamplingWithoutReplacement(), WOR, 1e-12),
    "sample_match": (acceptance.sample_match, SampleMatch(), DETERMINISTIC, 1e-12),
    "multi_step on the best": (acceptance.sample_match, MultiStep(), DETERMINISTIC, 1e-12),
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", FIGURES)
def test_the_figure_is_what_the_verifier_does(name: str, k: int) -> None:
    figure, verifier, kind, tolerance = FIGURES[name]
    for p, q in PAIRS:
        law, accepted = first_token(verifier, p, q, k, kind)
        assert distance(p, law) < 1e-12
        assert accepted == pytest.approx(figure(p, q, k), abs=tolerance), (p, q)


def figures(p: Tensor, q: Tensor, k: int) -> tuple[float, float, float, float]:
    return (
        acceptance.multi_step(p, q, k),
        acceptance.k_sequential(p, q, k),
        acceptance.optimal(p, q, k),
        acceptance.without_replacement(p, q, k),
    )


def test_order_of_the_rules() -> None:
    """No rule beats optimal transport on the same draws; without replacement is no worse than with."""
    for p, q in random_pairs(200, seed=6):
        for k in (1, 2, 3, 4):
            multi_step, k_seq, optimal, swor = figures(p, q, k)
            assert max(multi_step, k_seq) <= optimal + 1e-9
            assert swor >= multi_step - 1e-9


def test_acceptance_rises_with_k_and_one_draw_is_the_same_for_all() -> None:
    for p, q in random_pairs(200, seed=7):
        single = figures(p, q, 1)
        assert single == pytest.approx([1.0 - distance(p, q)] * 4, abs=1e-12)
        for k in (2, 3, 4):
            more = figures(p, q, k)
            assert all(after >= before - 1e-9 for after, before in zip(more, single, strict=True))
            single = more


@pytest.mark.parametrize("pair", [*DEGENERATE.values(), *random_pairs(6, seed=8)])
def test_estimate_without_replacement(pair: Pair) -> None:
    p, q = pair
    estimates = acceptance.without_replacement_estimate(p, q, most=4, paths=4000, seed=1)
    exact = [acceptance.without_replacement(p, q, k) for k in (1, 2, 3, 4)]
    assert estimates[0] == pytest.approx(exact[0], abs=1e-12)
    assert estimates == pytest.approx(exact, abs=0.02)


def test_estimate_without_replacement_is_unbiased() -> None:
    """The mean over many small estimates is nearer than one of them: an error in the weights would stay."""
    p, q = next(random_pairs(1, seed=9, sizes=(6,)))
    exact = acceptance.without_replacement(p, q, 3)
    estimates = [acceptance.without_replacement_estimate(p, q, 3, paths=4, seed=seed)[2] for seed in range(3000)]
    spread = torch.tensor(estimates).std().item()
    assert spread > 1e-3
    assert sum(estimates) / len(estimates) == pytest.approx(exact, abs=4 * spread / len(estimates) ** 0.5)


def test_figures_on_a_real_vocabulary_are_probabilities_in_order() -> None:
    logits = torch.randn(49152, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(49152, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    p, q = torch.softmax(3 * logits, 0), torch.softmax(3 * logits + noise, 0)
    swor = acceptance.without_replacement_estimate(p, q, most=4, paths=4)
    for k in (2, 4):
        multi_step, k_seq = acceptance.multi_step(p, q, k), acceptance.k_sequential(p, q, k)
        assert 0.5 < multi_step < k_seq < acceptance.optimal(p, q, k) < 1.0
        assert multi_step < swor[k - 1] < 1.0
