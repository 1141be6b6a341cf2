"""Optimal transport with membership cost (SpecTr, Sun et al. 2023, arXiv:2310.15141): the most that k draws can give.

A rule that sees k independent draws from q and emits one token of law p can hit one of the draws with a certain largest
probability. ``plan`` finds a coupling that reaches it by a linear program; ``optimal_acceptance`` gives the number
alone, for any vocabulary. Draws are treated as the *set* of their distinct tokens: only membership counts, so that this
is the same program as over k-tuples, k! times smaller. Pure arithmetic on distributions; knows no tree and no
randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array
from torch import Tensor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """A coupling of draws and output, over n tokens that p and q share.

    Attributes:
        choice: set of drawn tokens, indices in increasing order -> for each of them the probability [len(set)] that it
            is accepted when just these were drawn; the sum is at most 1.
        accepted: [n], how much of p(y) is emitted by accepting y; never more than p(y) but for rounding.
    """

    choice: dict[tuple[int, ...], FloatArray]
    accepted: FloatArray


def variables(size: int, k: int) -> int:
    """Unknowns of the program for ``k`` draws over ``size`` tokens: pairs of a set and a token in it."""
    return sum(count * math.comb(size, count) for count in range(1, min(k, size) + 1))


def plan(p: FloatArray, q: FloatArray, q_other: float, k: int) -> Plan:
    """A coupling that accepts most often, up to the solver's tolerance, and is exact whatever the solver returns.

    Args:
        p, q: [n], the tokens for which both are positive.
        q_other: q's mass on tokens that p excludes; a draw there can only be refused.
        k: number of draws.
    """
    if len(p) == 0:
        return Plan({}, np.zeros(0))
    sets, masses = _sets_and_masses(q, q_other, k)
    flow = _solve(sets, masses, p)
    return _repaired(sets, masses, p, flow)


def _sets_and_masses(q: FloatArray, q_other: float, k: int) -> tuple[list[IntArray], list[FloatArray]]:
    """By size 1 to k: the sets [m, size] of tokens that k draws can hit, and their probabilities [m]."""
    sets = []
    for size in range(1, min(k, len(q)) + 1):
        flat = np.fromiter(chain.from_iterable(combinations(range(len(q)), size)), np.int64)
        sets.append(flat.reshape(-1, size))
    return sets, [set_probability(q[members], q_other, k) for members in sets]


def set_probability(members: FloatArray, q_other: float, k: int) -> FloatArray:
    """Probability [m] that ``k`` draws hit all tokens of q-mass ``members`` [m, size], and nothing else but others.

    The coefficient of z^k in k! e^(q_other z) prod (e^(q_i z) - 1): sums of positive terms only, so that the smallest
    probability keeps its relative precision.
    """
    factorials = np.array([math.factorial(n) for n in range(k + 1)], dtype=np.float64)
    powers = np.arange(k + 1)
    series = np.broadcast_to(q_other**powers / factorials, (len(members), k + 1))
    for column in members.T:
        factor = column[:, None] ** powers / factorials
        longer = np.zeros((len(members), k + 1))
        for power in range(1, k + 1):
            longer[:, power:] += series[:, : k + 1 - power] * factor[:, power : power + 1]
        series = longer
    probability: FloatArray = series[:, k] * factorials[k]
    return probability


def _solve(sets: Sequence[IntArray], masses: Sequence[FloatArray], p: FloatArray) -> list[FloatArray]:
    """max sum f(S, y) with sum over y of f(S, y) <= P(S) and sum over S of f(S, y) <= p(y); f as [m, size] by size."""
    tokens = np.concatenate([members.ravel() for members in sets])
    sizes = np.concatenate([np.full(len(members), members.shape[1]) for members in sets])
    rows = np.repeat(np.arange(len(sizes)), sizes)
    unknowns = np.arange(len(tokens))
    where = (np.concatenate([rows, len(sizes) + tokens]), np.concatenate([unknowns, unknowns]))
    constraints = csr_array((np.ones(2 * len(tokens)), where), shape=(len(sizes) + len(p), len(tokens)))
    limits = np.concatenate([*masses, p])
    solution = linprog(-np.ones(len(tokens)), A_ub=constraints, b_ub=limits, method="highs").x
    # A solver that gives up leaves no flow: the repaired plan then accepts nothing, which is slow but exact.
    flow = np.zeros(len(tokens)) if solution is None else solution
    ends = np.cumsum([members.size for members in sets])[:-1]
    return [part.reshape(members.shape) for part, members in zip(np.split(flow, ends), sets, strict=True)]


def _repaired(
    sets: Sequence[IntArray], masses: Sequence[FloatArray], p: FloatArray, flow: Sequence[FloatArray]
) -> Plan:
    """A coupling near ``flow`` that keeps every limit: the solver keeps them to about 1e-7 only."""
    within = []
    columns = np.zeros(len(p))
    for members, mass, part in zip(sets, masses, flow, strict=True):
        positive = np.maximum(part, 0.0)
        within.append(positive * _at_most_one(mass, positive.sum(axis=1))[:, None])
        np.add.at(columns, members, within[-1])
    keep = _at_most_one(p, columns)
    choice: dict[tuple[int, ...], FloatArray] = {}
    accepted = np.zeros(len(p))
    for members, mass, part in zip(sets, masses, within, strict=True):
        part = part * keep[members]
        np.add.at(accepted, members, part)
        possible = mass > 0.0
        conditional = part[possible] / mass[possible, None]
        choice.update(zip(map(tuple, members[possible].tolist()), conditional, strict=True))
    return Plan(choice, accepted)


def _at_most_one(limit: FloatArray, amount: FloatArray) -> FloatArray:
    """Factors that bring ``amount`` down to ``limit`` where it is above."""
    ratio = np.ones_like(amount)
    np.divide(limit, amount, out=ratio, where=amount > limit)
    return ratio


def optimal_acceptance(p: Tensor, q: Tensor, k: int) -> float:
    """The largest probability, over all rules of output law ``p``, of emitting one of ``k`` draws from ``q``.

    1 - max(0, max over H of q(H)^k - p(H)): when all draws fall in a set H, so that only H can be hit, and that is
    likelier than p emits a token of H, the difference is lost; by max-flow min-cut nothing else is. q(H)^k is convex in
    q(H), so the worst H is a prefix of the tokens sorted by q/p, largest first. Float64 [vocabulary]; one sort.
    """
    drawn = q > 0
    p, q = p[drawn], q[drawn]
    order = torch.argsort(q / p, descending=True)
    loss = torch.cumsum(q[order], 0) ** k - torch.cumsum(p[order], 0)
    return 1.0 - max(0.0, float(loss.max()))
