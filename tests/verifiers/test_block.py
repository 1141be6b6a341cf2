"""Block verification: the paper's example, orderings by enumeration, and the edges where its formula divides by 0."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.audit.law import KEPT, World
from outrider.sampling.draw import Role, SeededStream
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.token_tree import TRIALS_PER_NODE, TokenTree
from outrider.types import ProposalKind, Topology
from outrider.verifiers.block import Block, after_rejection
from outrider.verifiers.multi_step import MultiStep
from verifiers.chain_and_tree_laws import (
    KINDS,
    RejectsEverything,
    SameEverywhere,
    drawn_tree,
    expected_accepted,
    grow,
    random_world,
    verdict_law,
)

IID = ProposalKind.IID
THIRDS = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)


def test_the_papers_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two guesses: 11/9 accepted on average, 10/9 token by token."""
    target, q = SameEverywhere(THIRDS), THIRDS.flip(0)
    expected = {"block": 0.0, "multi_step": 0.0}
    for first in (0, 1):
        for second in (0, 1):
            tree = drawn_tree(q, (0, 1), (first, second), IID)
            for name, verifier in (("block", Block()), ("multi_step", MultiStep())):
                for verdict, probability in outcomes(partial(verifier.verify, tree, target, position=0)):
                    expected[name] += float(q[first] * q[second]) * probability * len(verdict.path)
    assert expected["block"] == pytest.approx(11 / 9)
    assert expected["multi_step"] == pytest.approx(10 / 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_accepts_at_least_what_multi_step_does(seed: int, kind: ProposalKind) -> None:
    world = random_world(seed)
    for length in (1, 2, 3):
        shape = Chain(ChainOptions(length=length), kind)
        block, token = (expected_accepted(world, verifier, shape) for verifier in (Block(), MultiStep()))
        if length == 1 or kind is ProposalKind.DETERMINISTIC:
            assert block == pytest.approx(token, abs=1e-12)
        else:
            assert block > token + 1e-4


def test_a_chain_of_one_guess_is_the_same_rule() -> None:
    """With one guess the law of the verdict itself is that of rejection sampling."""
    world = random_world(1)
    for tree, _ in outcomes(partial(grow, Chain(ChainOptions(length=1), IID), world)):
        assert verdict_law(world, Block(), tree) == pytest.approx(verdict_law(world, MultiStep(), tree))


def test_no_guesses() -> None:
    world = random_world(2)
    law = {v.next_token: weight for v, weight in verdict_law(world, Block(), TokenTree(KEPT[-1], IID)).items()}
    assert law == pytest.approx(dict(enumerate(world.probabilities("target", ()).tolist())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_equal_to_the_target_is_kept_whole(dtype: torch.dtype) -> None:
    p = torch.softmax(torch.linspace(0, 3, 50, dtype=torch.float64), -1)
    tree = drawn_tree(p.to(dtype), (0, 1, 2, 3), (49, 3, 7, 48), IID)
    for seed in range(50):
        assert Block().verify(tree, SameEverywhere(p), SeededStream(seed), 0).path == (1, 2, 3, 4)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_empty_residual_still_gives_a_possible_token(kind: ProposalKind) -> None:
    """p equals q, yet every test fails (an event of probability 0 but for rounding): no NaN, a token of p's support."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    verdict = Block().verify(drawn_tree(p, (0, 1), (0, 1), kind), SameEverywhere(p), RejectsEverything(), 0)
    assert verdict.path == ()
    assert float(p[verdict.next_token]) > 0


def test_a_guess_outside_the_targets_support_ends_the_block() -> None:
    """Nothing after it is looked at, and its prefix has its own test."""
    p, q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    target = SameEverywhere(p)
    verdicts = dict(outcomes(partial(Block().verify, drawn_tree(q, (0, 1, 2), (0, 2, 0), IID), target, position=0)))
    assert {v.path for v in verdicts} == {(1,)}  # P_1 = 1, so h_1 = 1
    assert max(target.asked) == 1


def test_temperature_0_takes_no_draw() -> None:
    greedy = SamplingParams(temperature=0.0)
    for draft in (greedy, SamplingParams(temperature=1.0)):
        world = World(3, greedy, draft)
        for kind in KINDS:
            for tree, _ in outcomes(partial(grow, Chain(ChainOptions(length=3), kind), world)):
                assert list(verdict_law(world, Block(), tree).values()) == [1.0]


def test_keys_are_those_of_the_last_guess_of_a_prefix() -> None:
    p, q = torch.tensor([[0.4, 0.05, 0.55], [0.5, 0.3, 0.2]], dtype=torch.float64)
    stream, keys = EnumeratingStream(), set()
    while True:
        Block().verify(drawn_tree(q, (0, 1), (0, 0), IID), SameEverywhere(p), stream, 7)
        keys |= {key for key in stream.keys if key[1] is Role.ACCEPT}
        if not stream.advance():
            break
    assert keys == {(7, Role.ACCEPT, 0), (7, Role.ACCEPT, TRIALS_PER_NODE)}


def test_alpha_1_stays_exactly_1() -> None:
    """Rounding must not turn a node that cannot be rejected into one that can."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        p, q = torch.softmax(torch.randn(2, 7, dtype=torch.float64, generator=generator), -1)
        assert after_rejection(1.0, p, q, 0)[0] == 1.0


@pytest.mark.parametrize(("parents", "tokens"), [((0, 0), (0, 1)), ((0, 0), (1, 1))])
def test_branches_and_repeated_draws_are_refused(parents: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="needs a chain"):
        Block().verify(drawn_tree(THIRDS, parents, tokens, IID), SameEverywhere(THIRDS), SeededStream(1), 0)


def test_claims_no_tree() -> None:
    assert {topology for _, topology, _ in Block.exact_for} == {Topology.CHAIN}
