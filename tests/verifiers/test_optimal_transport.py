"""Optimal transport: the program against the closed form and against the program over tuples; the repaired plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from engine.tiny_engines import build_engine
from outrider.errors import InvalidOptionError
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind
from outrider.verifiers import transport
from outrider.verifiers.optimal_transport import MOST_VARIABLES, OptimalTransport, largest_support
from outrider.verifiers.transport import FloatArray, IntArray, optimal_acceptance, set_probability, variables
from verifiers.one_position import DEGENERATE, Pair, distance, first_token, random_pairs

IID = ProposalKind.IID


def optimum_over_tuples(p: Tensor, q: Tensor, k: int) -> float:
    """The paper's own program: a variable for every k-tuple and every output, membership as the gain."""
    size = len(p)
    tuples = list(product(range(size), repeat=k))
    gain, rows = [], np.zeros((len(tuples) + size, len(tuples) * size))
    for index, drawn in enumerate(tuples):
        for token in range(size):
            rows[index, len(gain)] = rows[len(tuples) + token, len(gain)] = 1.0
            gain.append(-1.0 if token in drawn else 0.0)
    limits = np.array([np.prod([float(q[token]) for token in drawn]) for drawn in tuples] + p.tolist())
    return -float(linprog(gain, A_ub=rows, b_ub=limits, method="highs").fun)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_closed_form_is_the_optimum_over_tuples(k: int) -> None:
    for p, q in [*DEGENERATE.values(), *random_pairs(30, seed=1, sizes=(3, 4))]:
        assert optimal_acceptance(p, q, k) == pytest.approx(optimum_over_tuples(p, q, k), abs=1e-6)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_plan_reaches_the_closed_form(k: int) -> None:
    for p, q in random_pairs(30, seed=2, sizes=(3, 5, 8)):
        shared = ((p > 0) & (q > 0)).numpy()
        found = transport.plan(p.numpy()[shared], q.numpy()[shared], float(q.numpy()[~shared].sum()), k)
        assert found.accepted.sum() == pytest.approx(optimal_acceptance(p, q, k), abs=1e-6)


def test_set_probabilities_are_those_of_tuples() -> None:
    q, other, k = np.array([0.4, 0.1, 1e-9]), 0.5 - 1e-9, 4
    for members in ([0], [2], [0, 1], [1, 2], [0, 1, 2]):
        masses = [*q[members], other]
        expected = sum(
            float(np.prod([masses[i] for i in drawn]))
            for drawn in product(range(len(masses)), repeat=k)
            if set(range(len(members))) <= set(drawn)
        )
        assert float(set_probability(q[members][None], other, k)[0]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_law_of_degenerate_pairs(name: str, k: int) -> None:
    p, q = DEGENERATE[name]
    law, accepted = first_token(OptimalTransport(), p, q, k, IID)
    assert distance(p, law) < 1e-12
    assert accepted == pytest.approx(optimal_acceptance(p, q, k), abs=1e-6)


def spoiled(sets: Sequence[IntArray], masses: Sequence[FloatArray], p: FloatArray) -> list[FloatArray]:
    """A solver that breaks every limit: negative flows, rows above P(S), columns above p."""
    source = np.random.default_rng(0)
    return [source.uniform(-0.3, 0.7, members.shape) for members in sets]


@pytest.mark.parametrize("k", [2, 3])
def test_the_law_is_exact_whatever_the_solver_returns(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(transport, "_solve", spoiled)
    for p, q in [*DEGENERATE.values(), *random_pairs(10, seed=3)]:
        law, accepted = first_token(OptimalTransport(), p, q, k, IID)
        assert distance(p, law) < 1e-12
        assert accepted <= optimal_acceptance(p, q, k) + 1e-12


@pytest.mark.parametrize("pair", random_pairs(3, seed=4, sizes=(4,)))
def test_without_the_repair_the_fault_is_caught(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(transport, "_solve", spoiled)
    monkeypatch.setattr(transport, "_at_most_one", lambda limit, amount: np.ones_like(amount))
    law, _ = first_token(OptimalTransport(), *pair, 2, IID)
    assert distance(pair[0], law) > 1e-3


def test_a_plan_is_found_once_for_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    solve = transport._solve
    monkeypatch.setattr(transport, "_solve", lambda *args: calls.append(1) or solve(*args))
    verifier = OptimalTransport()
    p, q = DEGENERATE["uniform q"]
    for _ in range(3):
        first_token(verifier, p, q, 2, IID)
    assert len(calls) == 1
    first_token(verifier, p.flip(0), q, 2, IID)
    first_token(verifier, p, q, 3, IID)
    assert len(calls) == 3


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_largest_support_is_the_last_that_fits(k: int) -> None:
    size = largest_support(k)
    assert variables(size, k) <= MOST_VARIABLES < variables(size + 1, k)


@pytest.mark.parametrize(("shape", "draws"), [("widths:3", 3), ("widths:1,6", 6), ("static:0/1/2/0.0/0.1/1.0/1.1", 4)])
def test_requests_with_a_large_support_are_refused_before_anything_runs(shape: str, draws: int) -> None:
    """The shape's most draws a node decide; no token may be out when the refusal comes."""
    target = ToyModel(vocab_size=50, order=1, seed=3)
    engine = build_engine("small_model", shape, IID, "optimal_transport", target=target)
    most = largest_support(draws)
    engine.generate([1], SamplingParams(temperature=1.0, top_k=most, max_tokens=4, seed=1))
    engine.generate([1], SamplingParams(max_tokens=4))  # temperature 0: one token is possible
    for top_k in (0, most + 1):
        with pytest.raises(InvalidOptionError, match=rf"{draws} draws over at most {most} .*--top-k {most} or less"):
            engine.stream([1], SamplingParams(temperature=1.0, top_k=top_k, max_tokens=4))


def test_a_single_draw_needs_no_limit() -> None:
    target = ToyModel(vocab_size=200, order=1, seed=3)
    engine = build_engine("small_model", "chain:4", IID, "optimal_transport", target=target)
    assert engine.generate([1], SamplingParams(temperature=1.0, max_tokens=9, seed=1)).stats.num_draft_tokens


def test_float32_rows_of_a_draft() -> None:
    """A q of sum 1 + 1e-7 was drawn from after normalisation: the law is exact for that."""
    p, q = (torch.softmax(torch.arange(n, n + 4, dtype=torch.float64) % 3, 0) for n in (0, 1))
    law, _ = first_token(OptimalTransport(), p, q.float(), 2, IID)
    assert distance(p, law) < 1e-12
