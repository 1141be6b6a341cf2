"""Toy worlds, hand-made trees and expected numbers of accepted guesses, by enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream, outcomes, output_law
from outrider.audit.law import KEPT, Source, Target, World, limits
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import Shape
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Role
from outrider.verifiers.base import Verdict, Verifier

KINDS = (ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT)


def random_world(seed: int, draft_temperature: float = 1.0, vocab_size: int = 3) -> World:
    """A target and an unrelated draft whose distributions depend on the whole prefix."""
    world = World(
        vocab_size, SamplingParams(temperature=0.7), SamplingParams(temperature=draft_temperature), order=None
    )
    for offset, name in enumerate(world.models):
        world.models[name] = ToyModel(vocab_size, order=None, sharpness=0.7, seed=1000 * offset + seed)
    return world


def grow(shape: Shape, world: World, stream: EnumeratingStream) -> TokenTree:
    return shape.grow(KEPT[-1], Source(world, shape.proposal), limits(stream))


def expected_accepted(world: World, verifier: Verifier, shape: Shape) -> float:
    """Mean number of accepted guesses of a step over all trees and verdicts."""
    total = 0.0
    for tree, tree_probability in outcomes(partial(grow, shape, world)):
        for verdict, probability in outcomes(partial(verifier.verify, tree, Target(world, tree), position=len(KEPT))):
            total += tree_probability * probability * len(verdict.path)
    return total


def verdict_law(world: World, verifier: Verifier, tree: TokenTree) -> dict[Verdict, float]:
    """The law of a tree's verdict: accepted path and next token."""
    return output_law(partial(verifier.verify, tree, Target(world, tree), position=len(KEPT)))


class SameEverywhere:
    """``TargetDistributions`` with one p at all nodes; ``asked`` lists the nodes looked at."""

    def __init__(self, p: Tensor) -> None:
        self.p = p
        self.asked: list[int] = []

    def probabilities(self, node: int) -> Tensor:
        self.asked.append(node)
        return self.p

    def greedy_token(self, node: int) -> int:
        return int(self.p.argmax())


def drawn_tree(q: Tensor, parents: Sequence[int], tokens: Sequence[int], kind: ProposalKind) -> TokenTree:
    """``tokens[i]`` drawn from ``q`` below node ``parents[i]``; each node's draws share one stored row."""
    tree = TokenTree(0, kind)
    rows: dict[int, int] = {}
    for parent, token in zip(parents, tokens, strict=True):
        if parent not in rows:
            rows[parent] = tree.add_row(q)
        tree.add(parent, token, "draft", rows[parent])
    return tree


class RejectsEverything:
    """A stream whose tests all fail unless they are certain, and whose draws take the last possible token."""

    def bernoulli(self, probability: float, position: int, role: Role, draw: int) -> bool:
        return False

    def categorical(self, probabilities: Tensor, position: int, role: Role, draw: int) -> int:
        assert torch.isfinite(probabilities).all()
        return int(torch.nonzero(probabilities)[-1])
