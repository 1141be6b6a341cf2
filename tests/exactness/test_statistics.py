"""The second net below enumeration: the real ``SeededStream``, with fixed seeds, so that nothing here is flaky."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from outrider.audit.law import KEPT, Source, Target, World
from outrider.sampling.draw import Role, SeededStream
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import GrowLimits
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.types import ProposalKind
from outrider.verifiers.multi_step import MultiStep

RUNS = 10_000
SIZE = 3


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test of observed counts; outcomes of probability 0 must not occur."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    return float(stats.chisquare(counts[possible], probabilities[possible] * counts.sum()).pvalue)


def two_tokens(world: World, shape: Widths, stream: SeededStream, position: int) -> tuple[int, int]:
    """One step, then plain sampling until two tokens are out."""
    tree = shape.grow(KEPT[-1], Source(world, shape.proposal), GrowLimits(64, 8, position, stream))
    verdict = MultiStep().verify(tree, Target(world, tree), stream, position)
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    while len(tokens) < 2:
        p = world.probabilities("target", tokens)
        tokens.append(stream.categorical(p, position + len(tokens), Role.TARGET, 0))
    return tokens[0], tokens[1]


@pytest.mark.parametrize("kind", [ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT])
def test_multi_step_frequencies(kind: ProposalKind) -> None:
    """20,000 steps (10,000 of each kind), every one at its own position of one request's stream."""
    world = World(SIZE, SamplingParams(temperature=0.7), SamplingParams(temperature=1.0))
    shape = Widths(WidthsOptions(widths=(2, 1)), kind)
    stream = SeededStream(2026)
    counts = np.zeros(SIZE * SIZE)
    for run in range(RUNS):
        first, second = two_tokens(world, shape, stream, 10 * run)
        counts[first * SIZE + second] += 1
    assert p_value(counts, world.target_law((), 2)) > 1e-3


def test_multi_step_frequencies_over_seeds() -> None:
    """The same position under many seeds: what a user sees who repeats a request."""
    world = World(SIZE, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0))
    shape = Widths(WidthsOptions(widths=(2,)), ProposalKind.IID)
    counts = np.zeros(SIZE * SIZE)
    for seed in range(4_000):
        first, second = two_tokens(world, shape, SeededStream(seed), 5)
        counts[first * SIZE + second] += 1
    assert p_value(counts, world.target_law((), 2)) > 1e-3


def test_same_seed_same_step() -> None:
    world = World(SIZE, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0))
    shape = Widths(WidthsOptions(widths=(2, 2)), ProposalKind.IID)

    def steps(seed: int) -> list[tuple[int, int]]:
        return [two_tokens(world, shape, SeededStream(seed), position) for position in range(40)]

    assert steps(1) == steps(1)
    assert steps(1) != steps(2)


def test_categorical_frequencies() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.25, 0.05, 0.0], dtype=torch.float64)
    stream = SeededStream(7)
    draws = [stream.categorical(probabilities, position, Role.TARGET, 0) for position in range(RUNS)]
    assert p_value(np.bincount(draws, minlength=7).astype(float), probabilities.numpy()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_does_not_need_normalised_weights(dtype: torch.dtype) -> None:
    weights = torch.tensor([2.0, 0.0, 6.0], dtype=dtype)
    stream = SeededStream(3)
    draws = [stream.categorical(weights, position, Role.DRAFT, 1) for position in range(RUNS)]
    assert p_value(np.bincount(draws, minlength=3).astype(float), np.array([0.25, 0.0, 0.75])) > 1e-3


class FixedUniform(SeededStream):
    """The production draw with a chosen uniform."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def uniform(self, position: int, role: Role, draw: int) -> float:
        return self.value


def test_categorical_at_the_ends_of_the_unit_interval() -> None:
    """A token of probability 0 is never drawn, not even at the first or the last uniform."""
    probabilities = torch.tensor([0.0, 0.3, 0.7, 0.0], dtype=torch.float32)
    assert FixedUniform(0.0).categorical(probabilities, 0, Role.TARGET, 0) == 1
    assert FixedUniform(1.0 - 2.0**-53).categorical(probabilities, 0, Role.TARGET, 0) == 2
    assert FixedUniform(1.0).categorical(probabilities, 0, Role.TARGET, 0) == 2


def test_bernoulli_is_certain_at_0_and_1_and_clips() -> None:
    for value in (0.0, 1.0 - 2.0**-53):
        assert FixedUniform(value).bernoulli(1.0, 0, Role.ACCEPT, 0)
        assert FixedUniform(value).bernoulli(1.5, 0, Role.ACCEPT, 0)
        assert not FixedUniform(value).bernoulli(0.0, 0, Role.ACCEPT, 0)
        assert not FixedUniform(value).bernoulli(-0.5, 0, Role.ACCEPT, 0)


def test_uniforms_are_uniform() -> None:
    stream = SeededStream(11)
    values = [stream.uniform(position, Role.ACCEPT, 0) for position in range(RUNS)]
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_keys_are_independent() -> None:
    """Every part of the key gives a new, uncorrelated stream; the order of the calls does not matter."""
    base = SeededStream(1)
    streams = {
        "base": [base.uniform(n, Role.DRAFT, 0) for n in range(RUNS)],
        "role": [base.uniform(n, Role.ACCEPT, 0) for n in range(RUNS)],
        "draw": [base.uniform(n, Role.DRAFT, 1) for n in range(RUNS)],
        "position": [base.uniform(n + 1, Role.DRAFT, 0) for n in range(RUNS)],
        "seed": [SeededStream(2).uniform(n, Role.DRAFT, 0) for n in range(RUNS)],
    }
    correlation = np.abs(np.corrcoef(list(streams.values())) - np.eye(len(streams)))
    assert correlation.max() < 0.04
    assert streams["base"] == [base.uniform(n, Role.DRAFT, 0) for n in reversed(range(RUNS))][::-1]


def test_no_seed_gives_different_streams() -> None:
    assert SeededStream(None).seed != SeededStream(None).seed
