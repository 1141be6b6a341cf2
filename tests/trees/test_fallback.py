"""EdgeLLM's self-adaptive threshold: its update rule, and what it may not depend on when it stops a chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream
from outrider.audit.law import KEPT, Source, World, limits, total_variation
from outrider.engine.registry import VERIFIERS, load_class
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import Candidates, GrowLimits
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.fallback import HIGHEST, LOWEST, FallbackThreshold
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology

KINDS = [ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT]
Q = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)


class CountingSource:
    """The same distribution everywhere; counts its calls."""

    name = "counting"

    def __init__(self, q: Tensor = Q) -> None:
        self.q = q
        self.calls = 0

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        self.calls += 1
        return [Candidates(probabilities=self.q) for _ in nodes]


def grow(shape: Chain, source: CountingSource, seed: int = 0) -> TokenTree:
    return shape.grow(0, source, GrowLimits(64, 64, 3, SeededStream(seed)))


@pytest.mark.parametrize(
    ("drafted", "accepted", "factor"),
    [(4, 4, 0.5), (1, 1, 0.5), (4, 0, 2.0), (4, 2, 2.0**0.5), (4, 3, 2.0**0.25), (1, 0, 2.0), (0, 0, 1.0), (3, 5, 0.5)],
)
def test_update_rule(drafted: int, accepted: int, factor: float) -> None:
    threshold = FallbackThreshold(0.01)
    threshold.update(drafted, accepted)
    assert threshold.alpha == pytest.approx(0.01 * factor)


def test_alpha_stays_within_its_limits() -> None:
    threshold = FallbackThreshold(0.01)
    for _ in range(60):
        threshold.update(4, 4)
    assert threshold.alpha == LOWEST
    for _ in range(60):
        threshold.update(4, 0)
    assert threshold.alpha == HIGHEST
    assert FallbackThreshold(0.0).alpha == LOWEST
    assert FallbackThreshold(5.0).alpha == HIGHEST


def test_chain_stops_before_its_confidence_is_below() -> None:
    """0.4, 0.16, 0.064: the third guess would be below 0.1, so it is not made."""
    source = CountingSource()
    assert grow(Chain(ChainOptions(length=9, fallback=0.1)), source).drafted == 2
    assert source.calls == 3
    assert grow(Chain(ChainOptions(length=9, fallback=0.0)), source).drafted == 9
    assert grow(Chain(ChainOptions(length=9, fallback=0.9)), source).drafted == 1, "the first guess is always made"


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_drawn_guess_stays_and_ends_the_chain(kind: ProposalKind) -> None:
    """A drawn token of low q is kept; no draft call follows when it took the chain below the threshold."""
    lasts, lengths = set(), set()
    for seed in range(80):
        source = CountingSource()
        tree = grow(Chain(ChainOptions(length=6, fallback=0.05), kind), source, seed)
        scores = [float(Q[token]) for token in tree.tokens[1:]]
        confidences = torch.cumprod(torch.tensor(scores, dtype=torch.float64), 0).tolist()
        # Every guess but the first was drawn from a state in which even the best token would have stayed above.
        assert all(confidence * 0.4 >= 0.05 for confidence in confidences[:-1])
        assert confidences[-1] * 0.4 < 0.05
        assert source.calls == len(scores) + (confidences[-1] >= 0.05)
        lasts.add(tree.tokens[-1])
        lengths.add(len(scores))
    assert lasts == {0, 1, 2, 3, 4}
    assert len(lengths) > 1


@pytest.mark.parametrize("setting", [0.8, 0.0])
@pytest.mark.parametrize("alpha", [0.08, 0.12, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_law_is_exact_for_every_verifier(kind: ProposalKind, alpha: float, setting: float) -> None:
    """The stop depends on drawn tokens: enumerated with every registered rule that is exact for such chains."""
    params = SamplingParams(temperature=setting)
    regime = params.regime
    where = World(3, params, SamplingParams(temperature=1.2))
    shape = Chain(ChainOptions(length=3, fallback=alpha), kind)
    lengths = set()

    def drawn(world: World, stream: EnumeratingStream) -> TokenTree:
        tree = shape.grow(KEPT[-1], Source(world, kind), limits(stream))
        lengths.add(tree.drafted)
        return tree

    tried = 0
    for name in VERIFIERS:
        cls = load_class("verifier", name)
        if not cls.lossy and (kind, Topology.CHAIN, regime) in cls.exact_for:
            assert total_variation(where, cls(), partial(drawn), 4) < 1e-12, name
            tried += 1
    assert tried
    assert kind is ProposalKind.DETERMINISTIC or alpha == 0.2 or len(lengths) > 1, "the stop must depend on the draws"


def test_dropping_instead_of_keeping_is_caught() -> None:
    """The plausible mistake: stop by dropping the drawn token that took the chain below the threshold."""
    where = World(3, SamplingParams(temperature=0.8), SamplingParams(temperature=1.2))
    kind = ProposalKind.IID

    def dropping(world: World, stream: EnumeratingStream) -> TokenTree:
        tree = Chain(ChainOptions(length=1), kind).grow(KEPT[-1], Source(world, kind), limits(stream))
        q = tree.trial_distribution(tree.trials(0)[0])
        return tree if float(q[tree.tokens[1]]) >= 0.3 else TokenTree(KEPT[-1], kind)

    assert total_variation(where, load_class("verifier", "multi_step")(), dropping, 2) > 1e-2


def test_state_belongs_to_one_request() -> None:
    configured = Chain(ChainOptions(length=9, fallback=0.1))
    first, second = configured.for_request(), configured.for_request()
    first.observe(2, 2)
    first.observe(2, 2)
    assert grow(first, CountingSource()).drafted == 4  # 0.4 ** 4 = 0.0256 >= 0.025
    assert grow(second, CountingSource()).drafted == 2
    assert grow(configured.for_request(), CountingSource()).drafted == 2
    plain = Chain(ChainOptions(length=9))
    assert plain.for_request() is plain


def test_n_gram_scores_count_too() -> None:
    class Scripted:
        name = "scripted"

        def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
            return [Candidates([7, 8], [0.75, 0.2]) for _ in nodes]

    tree = Chain(ChainOptions(length=9, fallback=0.4)).grow(0, Scripted(), GrowLimits(64, 64, 3, SeededStream(0)))
    assert tree.tokens == [0, 7, 7, 7]  # 0.75 ** 3 = 0.42


@pytest.mark.parametrize("value", [-0.1, 0.91, 1.0])
def test_fallback_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        ChainOptions(fallback=value)


def test_regimes_are_both_covered() -> None:
    assert {SamplingParams(temperature=t).regime for t in (0.0, 0.8)} == set(Regime)
