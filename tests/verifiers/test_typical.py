"""Medusa's typical acceptance: threshold, longest path, greedy at temperature 0, and never without --lossy."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from engine.tiny_engines import build_engine, random_prompts
from outrider.config import EngineConfig
from outrider.engine.build import plan_parts
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Role
from outrider.verifiers.typical import Typical, TypicalOptions
from verifiers.one_position import distance, first_token, row

SHARP, FLAT = row(0.9, 0.06, 0.03, 0.01), row(0.25, 0.25, 0.25, 0.25)


class Rows:
    """``TargetDistributions`` from a list, one row per node."""

    def __init__(self, *rows: Tensor) -> None:
        self.rows = rows

    def probabilities(self, node: int) -> Tensor:
        return self.rows[node]

    def greedy_token(self, node: int) -> int:
        return int(self.rows[node].argmax())


def test_threshold_by_hand() -> None:
    rule = Typical()
    assert rule.threshold(FLAT) == pytest.approx(0.3 / 4)  # exp(-log 4) = 1/4
    assert rule.threshold(row(0.5, 0.5)) == 0.09
    assert rule.threshold(row(0.0, 1.0)) == 0.09
    entropy = -sum(x * math.log(x) for x in SHARP.tolist())
    assert Typical(TypicalOptions(epsilon=0.5, delta=0.2)).threshold(SHARP) == pytest.approx(0.2 * math.exp(-entropy))


def paths(*chains: tuple[int, ...]) -> TokenTree:
    tree = TokenTree(0)
    for chain in chains:
        node = 0
        for token in chain:
            node = tree.children(node).get(token) or tree.add(node, token)
    return tree


def test_the_longest_plausible_path_wins() -> None:
    """Token 1 is likelier at the root; only below token 2 does the path go on."""
    tree = paths((1, 3), (2, 0))  # nodes: 1 and 2 below token 1, 3 and 4 below token 2
    target = Rows(row(0.1, 0.5, 0.3, 0.1), SHARP, FLAT, FLAT, row(0.0, 0.0, 0.0, 1.0))
    verdict = Typical().verify(tree, target, SeededStream(0), 7)
    assert verdict.path == (3, 4)
    assert verdict.next_token == 3


def test_ties_on_length_go_to_the_likelier_path() -> None:
    tree = paths((1,), (2,))
    verdict = Typical().verify(tree, Rows(row(0.1, 0.3, 0.5, 0.1), FLAT, FLAT), SeededStream(0), 0)
    assert [tree.tokens[node] for node in verdict.path] == [2]


def test_an_implausible_guess_ends_the_path_and_hides_what_is_below() -> None:
    tree = paths((0, 2, 0))
    target = Rows(SHARP, SHARP, row(1.0, 0.0, 0.0, 0.0), FLAT)
    assert Typical().verify(tree, target, SeededStream(0), 0).path == (1,)
    assert Typical(TypicalOptions(epsilon=0.02)).verify(tree, target, SeededStream(0), 0).path == (1, 2, 3)


def test_the_next_token_is_plain_samplings_draw_at_the_end_of_the_path() -> None:
    tree = paths((0,))
    stream = SeededStream(5)
    for position in range(20):
        verdict = Typical().verify(tree, Rows(SHARP, FLAT), stream, position)
        assert verdict.path == (1,)
        assert verdict.next_token == stream.categorical(FLAT, position + 1, Role.TARGET, 0)


def test_it_is_lossy() -> None:
    """What the flag is for: the law is off by far more than rounding."""
    p, q = row(0.6, 0.3, 0.1), row(0.1, 0.3, 0.6)
    law, _ = first_token(Typical(), p, q, 2, ProposalKind.IID)
    assert distance(p, law) > 0.05
    assert Typical.lossy
    assert Typical.exact_for == frozenset()


@pytest.mark.parametrize("shape", ["chain:4", "widths:3,2,1"])
def test_temperature_zero_is_greedy(shape: str) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    lossy = build_engine("small_model", shape, verifier="typical", lossy=True)
    for prompt in random_prompts(4, 12, seed=2):
        result = lossy.generate(prompt, params)
        assert result.stats.lossy
        assert result.tokens == build_engine("none").generate(prompt, params).tokens
    assert result.stats.num_accepted_tokens > 5


@pytest.mark.parametrize("regime", Regime)
def test_it_needs_lossy_and_lossy_needs_it(regime: Regime) -> None:
    parts = {"drafter": "ngram", "adaptive": False}
    with pytest.raises(IllegalCombinationError, match=r"'typical' is not exact.*--lossy accepts a changed output"):
        plan_parts(EngineConfig(verifier="typical", **parts), regime)
    assert plan_parts(EngineConfig(verifier="typical", lossy=True, **parts), regime).verifier.name == "typical"
    for exact in ("greedy", "multi_step", "sample_match"):
        with pytest.raises(InvalidOptionError, match=f"--verifier typical; '{exact}' is exact"):
            plan_parts(EngineConfig(verifier=exact, lossy=True, **parts), regime)


@pytest.mark.parametrize("options", ["epsilon=1", "epsilon=-0.1", "delta=-1", "delta=nan", "alpha=0.3"])
def test_options_outside_their_range(options: str) -> None:
    with pytest.raises(InvalidOptionError, match="verifier 'typical'"):
        plan_parts(EngineConfig(verifier=f"typical:{options}", lossy=True), Regime.SAMPLED)
    plan = plan_parts(EngineConfig(verifier="typical:0.2,delta=0.5", lossy=True), Regime.SAMPLED)
    assert plan.verifier.options == TypicalOptions(epsilon=0.2, delta=0.5)
