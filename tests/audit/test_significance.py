"""The tests of distributions themselves: right size, right power, known examples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from outrider.audit.significance import (
    equal_mass_groups,
    goodness_of_fit,
    holm,
    permutation_test,
    summed,
    two_samples,
)


def skewed(size: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, size + 1)
    return weights / weights.sum()


def test_goodness_of_fit_equals_scipy_when_nothing_is_pooled() -> None:
    p = np.array([0.5, 0.3, 0.2])
    counts = np.array([520, 290, 190])
    found = goodness_of_fit(counts, p)
    wanted = stats.chisquare(counts, p * 1000)
    assert found is not None
    assert (found.statistic, found.p_value) == pytest.approx((wanted.statistic, wanted.pvalue))
    assert (found.cells, found.freedom) == (3, 2)


def test_p_values_are_uniform_under_the_null_with_a_long_tail() -> None:
    """5,000 cells, most with an expectation far below one."""
    generator, p = np.random.default_rng(0), skewed(5_000)
    found = [goodness_of_fit(generator.multinomial(2_000, p), p) for _ in range(300)]
    values = [test.p_value for test in found if test is not None]
    assert len(values) == 300
    assert stats.kstest(values, "uniform").pvalue > 0.01
    assert found[0] is not None
    assert 2 <= found[0].cells <= 32


def test_an_impossible_outcome_is_certain_evidence() -> None:
    found = goodness_of_fit(np.array([50, 49, 1]), np.array([0.5, 0.5, 0.0]))
    assert found is not None
    assert found.p_value == 0.0
    assert summed([found, goodness_of_fit(np.array([5, 5]), np.array([0.5, 0.5]), min_expected=1)]).p_value == 0.0  # type: ignore[union-attr]


def test_a_single_cell_is_no_test() -> None:
    assert goodness_of_fit(np.array([30]), np.array([1.0])) is None
    assert goodness_of_fit(np.array([12, 1]), np.array([0.9, 0.1])) is None
    assert two_samples([1] * 50, [1] * 50) is None
    assert permutation_test([Counter({1: 1})] * 3, [Counter({1: 1})] * 3, 9, 0) is None
    assert summed([None, None]) is None


def test_summed_adds_statistics_and_freedom() -> None:
    one = goodness_of_fit(np.array([60, 40]), np.array([0.5, 0.5]))
    both = summed([one, None, one])
    assert one is not None
    assert both is not None
    assert (both.statistic, both.freedom) == pytest.approx((8.0, 2))
    assert both.p_value < one.p_value


def test_two_samples_size_and_power() -> None:
    generator, p = np.random.default_rng(1), skewed(300)
    share = 0.1 / (1.0 - p[0])
    moved = (1.0 - share) * p
    moved[0] += share
    assert 0.5 * np.abs(moved - p).sum() == pytest.approx(0.1)
    null, shifted = [], []
    for _ in range(200):
        plain = generator.choice(300, 2_000, p=p).tolist()
        same, other = (generator.choice(300, 2_000, p=law).tolist() for law in (p, moved))
        for found, sample in ((null, same), (shifted, other)):
            test = two_samples(plain, sample)
            assert test is not None
            found.append(test.p_value)
    assert stats.kstest(null, "uniform").pvalue > 0.01
    assert np.mean(np.array(shifted) < 0.002) > 0.95


def test_two_samples_of_different_sizes() -> None:
    even = two_samples([0, 1] * 100, [0, 1] * 1_000)
    assert even is not None
    assert even.statistic == pytest.approx(0.0)


def test_permutations_respect_dependent_counts() -> None:
    """A unit repeats one token ten times: a chi-square test of the counts would cry wolf, this one does not."""
    generator = np.random.default_rng(2)
    values, naive = [], []
    for seed in range(60):
        first, second = ([Counter({int(t): 10}) for t in generator.integers(0, 6, 200)] for _ in range(2))
        test = permutation_test(first, second, 199, seed)
        assert test is not None
        values.append(test.p_value)
        wrong = two_samples(*([t for u in units for t in u.elements()] for units in (first, second)))
        assert wrong is not None
        naive.append(wrong.p_value)
    assert np.mean(np.array(values) < 0.05) < 0.15
    assert np.mean(np.array(naive) < 0.05) > 0.5


def test_permutations_find_a_difference_and_are_reproducible() -> None:
    first = [Counter({0: 1, 1: 1})] * 100
    second = [Counter({0: 1, 1: 1})] * 70 + [Counter({0: 2})] * 30
    found = permutation_test(first, second, 999, 5)
    assert found is not None
    assert found.p_value == 1 / 1000
    assert found == permutation_test(first, second, 999, 5)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_equal_mass_groups_follow_the_score() -> None:
    score = np.array([0.1, 3.0, 1.0, 2.0])
    group = equal_mass_groups(score, np.array([0.25] * 4), 2)
    assert group.tolist() == [1, 0, 1, 0]
    assert equal_mass_groups(score, np.array([0.97, 0.01, 0.01, 0.01]), 4).tolist() == [0, 0, 0, 0]
