"""Tests of distributions: chi-square of one sample and of two, a permutation test, and Holm's correction.

Cells with few counts are pooled, so that the chi-square approximation holds; the number of cells is capped, because a
bias that is spread over more of them is harder to see at the same sample size. Knows nothing of models or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, stats

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_CELLS = 32
MIN_EXPECTED = 10.0
"""Counts that a cell of its own must have in expectation, the sample (or each of the two) taken alone."""
_PERMUTATIONS_AT_ONCE = 250


@dataclass(frozen=True, slots=True)
class Significance:
    """One test. ``cells`` are those compared after pooling; ``freedom`` is 0 for a permutation test."""

    statistic: float
    freedom: int
    cells: int
    p_value: float


def goodness_of_fit(
    counts: IntArray, probabilities: FloatArray, max_cells: int = MAX_CELLS, min_expected: float = MIN_EXPECTED
) -> Significance | None:
    """Chi-square test of ``counts`` [cells] against known ``probabilities`` [cells]; rare cells are pooled.

    An outcome of probability 0 that occurred gives a p-value of 0. ``None`` when pooling leaves a single cell.
    """
    possible = probabilities > 0.0
    if int(counts[~possible].sum()) > 0:
        return Significance(float("inf"), 0, int(possible.sum()), 0.0)
    expected = probabilities[possible] * (int(counts.sum()) / float(probabilities.sum()))
    group = _pooled(expected, max_cells, min_expected)
    wanted = np.bincount(group, expected)
    seen = np.bincount(group, counts[possible].astype(np.float64), len(wanted))
    if len(wanted) < 2:
        return None
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return chi_square(statistic, len(wanted) - 1)


def chi_square(statistic: float, freedom: int) -> Significance:
    """The test whose statistic has ``freedom`` degrees of freedom."""
    return Significance(statistic, freedom, freedom + 1, float(stats.chi2.sf(statistic, freedom)))


def summed(tests: Iterable[Significance | None]) -> Significance | None:
    """Independent chi-square tests as one: sees a small bias that all of them share. ``None`` without any."""
    known = [test for test in tests if test is not None]
    if not known:
        return None
    if any(test.freedom == 0 for test in known):
        return Significance(float("inf"), 0, sum(test.cells for test in known), 0.0)
    return chi_square(sum(test.statistic for test in known), sum(test.freedom for test in known))


def two_samples(
    first: Sequence[Hashable], second: Sequence[Hashable], max_cells: int = MAX_CELLS
) -> Significance | None:
    """Chi-square test that two samples of independent draws have one distribution.

    ``None`` when pooling leaves a single cell, for example because every draw is the same.
    """
    counts = (Counter(first), Counter(second))
    keys = sorted(counts[0] | counts[1], key=lambda key: (-(counts[0][key] + counts[1][key]), repr(key)))
    table = np.array([[count[key] for key in keys] for count in counts], dtype=np.float64)
    sizes = table.sum(axis=1)
    total = table.sum(axis=0)
    group = _pooled(total * (sizes.min() / sizes.sum()), max_cells, MIN_EXPECTED)
    pooled = np.stack([np.bincount(group, row) for row in table])
    if pooled.shape[1] < 2:
        return None
    expected = np.outer(sizes, pooled.sum(axis=0)) / sizes.sum()
    return chi_square(float(((pooled - expected) ** 2 / expected).sum()), pooled.shape[1] - 1)


def permutation_test(
    first: Sequence[Counter[Hashable]], second: Sequence[Counter[Hashable]], permutations: int, seed: int
) -> Significance | None:
    """Whether two groups of independent units have one law of counts, however counts of a unit depend on each other.

    The statistic is sum (a - b)^2 / (a + b) over keys, a and b being a key's total in either group (scaled to equal
    group sizes); its law under the null hypothesis comes from handing the units out anew, ``permutations`` times. The
    p-value counts the observed partition too, so it is valid and at least 1 / (permutations + 1).
    """
    units = [*first, *second]
    keys = {key: index for index, key in enumerate(dict.fromkeys(key for unit in units for key in unit))}
    if len(keys) < 2:
        return None
    entries = [(row, keys[key], count) for row, unit in enumerate(units) for key, count in unit.items()]
    rows, columns, values = (np.array(column) for column in zip(*entries, strict=True))
    table = sparse.csr_matrix((values.astype(np.float64), (rows, columns)), shape=(len(units), len(keys)))
    total = np.asarray(table.sum(axis=0)).ravel()
    scale = len(first) / max(1, len(second))

    def statistic(labels: FloatArray) -> FloatArray:
        a = (table.T @ labels.T).T  # [partitions, keys]
        found: FloatArray = ((a - scale * (total - a)) ** 2 / total).sum(axis=1)
        return found

    observed_labels = np.zeros(len(units))
    observed_labels[: len(first)] = 1.0
    observed = float(statistic(observed_labels[None])[0])
    generator = np.random.Generator(np.random.PCG64(seed))
    as_large = 1
    for start in range(0, permutations, _PERMUTATIONS_AT_ONCE):
        labels = np.tile(observed_labels, (min(_PERMUTATIONS_AT_ONCE, permutations - start), 1))
        # A partition is as large as the observed one up to rounding: ties count against significance.
        as_large += int((statistic(generator.permuted(labels, axis=1)) >= observed * (1.0 - 1e-9)).sum())
    return Significance(observed, 0, len(keys), as_large / (permutations + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): rejecting those below alpha errs with probability <= alpha."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def equal_mass_groups(score: FloatArray, mass: FloatArray, count: int) -> IntArray:
    """Group of each cell, [cells]: cells in order of falling ``score``, cut so that each group has about 1 / count."""
    order = np.argsort(-score, kind="stable")
    before = np.cumsum(mass[order]) - mass[order]
    group = np.zeros(len(score), dtype=np.int64)
    group[order] = np.minimum(count - 1, (before / mass.sum() * count).astype(np.int64))
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def _pooled(expected: FloatArray, max_cells: int, min_expected: float) -> IntArray:
    """Cell -> pooled cell: the largest stay alone, all others share one, which is not smaller than the minimum."""
    order = np.argsort(-expected, kind="stable")
    alone = min(max_cells - 1, int((expected >= min_expected).sum()))
    if alone < len(expected):
        rest = float(expected[order[alone:]].sum())
        while alone > 0 and rest < min_expected:
            alone -= 1
            rest += float(expected[order[alone]])
    group = np.full(len(expected), alone, dtype=np.int64)
    group[order[:alone]] = np.arange(alone)
    return group
