"""Traversal verification: block verification on chains, never below top-down verification, and its own pitfalls."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.audit import faults
from outrider.audit.enumeration import outcomes
from outrider.sampling.draw import SeededStream
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.types import ProposalKind
from outrider.verifiers import traversal
from outrider.verifiers.block import Block
from outrider.verifiers.multi_step import MultiStep
from outrider.verifiers.traversal import Traversal
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

IID, WOR = ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_is_block_verification_on_a_chain(kind: ProposalKind) -> None:
    """The law of (accepted path, next token) given the tree, for every tree."""
    for seed in range(3):
        world = random_world(seed)
        for tree, _ in outcomes(partial(grow, Chain(ChainOptions(length=3), kind), world)):
            assert verdict_law(world, Traversal(), tree) == pytest.approx(verdict_law(world, Block(), tree), abs=1e-14)


def test_gives_blocks_verdict_for_the_same_seed() -> None:
    """Same tests under the same keys, on a vocabulary of 1,000."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.softmax(torch.randn(2, 1000, dtype=torch.float64, generator=generator), -1)
    lengths = set()
    for seed in range(60):
        tokens = torch.multinomial(q, 6, replacement=True, generator=generator).tolist()
        tree = drawn_tree(q, range(6), tokens, IID)
        verdicts = [v.verify(tree, SameEverywhere(p), SeededStream(seed), 4) for v in (Traversal(), Block())]
        assert verdicts[0] == verdicts[1]
        lengths.add(len(verdicts[0].path))
    assert len(lengths) > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(3,), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_accepts_at_least_what_multi_step_does(widths: tuple[int, ...], kind: ProposalKind) -> None:
    shape = Widths(WidthsOptions(widths=widths), kind)
    for seed, temperature in ((0, 1.0), (1, 2.0)):
        world = random_world(seed, temperature)
        up, down = (expected_accepted(world, verifier, shape) for verifier in (Traversal(), MultiStep()))
        if len(widths) == 1 or kind is ProposalKind.DETERMINISTIC:
            assert up == pytest.approx(down, abs=1e-12)
        else:
            assert up > down + 1e-4


def test_repeated_draws_never_lower_the_number_below_multi_step() -> None:
    """Two tokens and three or four draws: every tree has duplicates, also apart from each other."""
    for seed in range(12):
        for widths in ((3, 1), (4, 1)):
            world = random_world(seed, vocab_size=2)
            shape = Widths(WidthsOptions(widths=widths), IID)
            up, down = (expected_accepted(world, verifier, shape) for verifier in (Traversal(), MultiStep()))
            assert up >= down - 1e-12


@pytest.mark.parametrize(
    ("kind", "tamper"),
    [
        (IID, faults.sort_by_q),
        (IID, faults.try_duplicates_once),
        (IID, faults.drop_unlikely),
        (IID, faults.renormalise_iid),
        (IID, faults.q_of_another_temperature),
        (WOR, faults.sort_by_q),
        (WOR, faults.forget_exclusions),
        (WOR, faults.drop_unlikely),
    ],
)
def test_tampering_with_the_tree_is_caught(kind: ProposalKind, tamper: faults.Tamper) -> None:
    assert faults.distance(kind, tamper, Traversal()) > faults.CAUGHT
    assert faults.distance(kind, faults.unchanged, Traversal()) < 1e-12


def test_the_mistake_of_a_public_implementation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha = S / (sum of q' without the rejected token) instead of S / (S + 1 - alpha)."""

    def wrong(alpha: float, p: Tensor, q: Tensor, token: int) -> tuple[float, Tensor]:
        rest = (alpha * p - q).clamp(min=0.0)
        mass = float(rest.sum())
        return (
            (mass / (1.0 - float(q[token])), rest / mass) if mass > 0.0 and alpha < 1.0 else right(alpha, p, q, token)
        )

    right = traversal.after_rejection
    monkeypatch.setattr(traversal, "after_rejection", wrong)
    assert faults.distance(WOR, None, Traversal()) > faults.CAUGHT


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_draft_equal_to_the_target_reaches_a_leaf(kind: ProposalKind) -> None:
    """The first leaf in draw order is accepted surely; rounding cannot bring a NaN when every test fails."""
    p = torch.tensor([0.3, 0.2, 0.5, 0.0], dtype=torch.float64)
    tree = drawn_tree(p, (0, 0, 1, 1, 2), (0, 2, 1, 0, 2), kind)
    for seed in range(30):
        assert Traversal().verify(tree, SameEverywhere(p), SeededStream(seed), 0).path == (1, 3)
    verdict = Traversal().verify(tree, SameEverywhere(p), RejectsEverything(), 0)
    assert verdict.path == ()
    assert float(p[verdict.next_token]) > 0


def test_a_branch_outside_the_targets_support_is_not_entered() -> None:
    """Node 1 cannot be accepted, so nobody asks for p below it."""
    p, q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    target = SameEverywhere(p)
    Traversal().verify(drawn_tree(q, (0, 0, 1, 2), (2, 0, 0, 1), WOR), target, SeededStream(1), 0)
    assert 0 in target.asked
    assert not {1, 3} & set(target.asked)


def test_a_leaf_needs_its_distribution_only_when_it_is_accepted() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    for seed in range(30):
        target = SameEverywhere(p)
        verdict = Traversal().verify(drawn_tree(q, (0, 0), (0, 1), WOR), target, SeededStream(seed), 0)
        assert set(target.asked) == {0, *verdict.path}


def test_deep_trees_and_large_vocabularies() -> None:
    """A comb of depth 1,000 (far beyond the recursion limit) and 64 nodes over a vocabulary of 49,152."""
    p = torch.tensor([0.9, 0.1], dtype=torch.float64)
    parents = [node for level in range(1000) for node in (2 * level - 1 if level else 0,) * 2]
    comb = drawn_tree(p.flip(0), parents, [0, 1] * 1000, WOR)
    assert max(comb.depths) == 1000
    assert len(Traversal().verify(comb, SameEverywhere(p), SeededStream(2), 0).path) == 1000
    wide = torch.softmax(torch.linspace(0.0, 9.0, 49_152, dtype=torch.float64), -1)
    tree = drawn_tree(wide.flip(0), [0] * 8 + [1 + i // 7 for i in range(56)], [*range(8), *range(56)], IID)
    assert len(tree) == 65
    assert Traversal().verify(tree, SameEverywhere(wide), RejectsEverything(), 0).path == ()
