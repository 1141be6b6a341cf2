"""Traversal verification (Weng et al. 2025, arXiv:2505.12398): a token tree judged from its leaves to its root.

Every node carries alpha, the probability that the target goes through it given what was drawn and rejected so far:
alpha = 1 at the root and min(1, alpha(parent) p'(x) / q'(x)) at a child x. The first leaf in draw order is accepted
with probability alpha, and the next token is drawn from its p'. Otherwise it is removed: with S the sum of
[alpha p' - q']+ at its parent, p' becomes norm[alpha p' - q']+ and alpha becomes S / (S + 1 - alpha) there, which the
remaining children then meet; a node without remaining children is a leaf. q' is the distribution that the next child
was drawn from: the same for draws with replacement, renormalised without, one-hot for a deterministic guess. On a
chain this is block verification. Knows no model, cache or clock.

A token drawn again from the same q after its rejection has alpha 0, because the rejection took all its mass from p'; it
still counts as a rejected trial. The whole tree's p must be at hand, so this rule cannot commit tokens early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.sampling.draw import RandomStream, Role
from outrider.trees.token_tree import TRIALS_PER_NODE, TokenTree, Trial
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import (
    Exactness,
    TargetDistributions,
    Verdict,
    Verifier,
    exactness,
    proposal_of,
)
from outrider.verifiers.block import after_rejection, flow


@dataclass(slots=True)
class _Visit:
    """A node between the root and the leaf in hand: its alpha and p' (``None`` until somebody looks) as of now.

    ``tried`` trials were rejected or are in hand; the last of them is ``in_hand`` with its q as long as alpha and p' do
    not count it as rejected. ``key`` is the counter of the node's own test.
    """

    node: int
    key: int
    alpha: float
    tried: int = 0
    p: Tensor | None = None
    in_hand: tuple[Trial, Tensor | None] | None = None


class Traversal(Verifier):
    """Depth first, children in draw order, every node tested after all that is below it was rejected."""

    exact_for: ClassVar[Exactness] = exactness(
        [ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT], list(Topology), list(Regime)
    )
    summary = "a tree judged from its leaves to its root; block verification generalised to branches"
    source = "Traversal verification, Weng et al. 2025, arXiv:2505.12398"

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        way = [_Visit(0, -1, 1.0)]
        while True:
            visit = way[-1]
            child = _next_child(tree, target, visit)
            if child is not None:
                way.append(child)
            elif len(way) == 1 or random.bernoulli(visit.alpha, position, Role.ACCEPT, visit.key):
                break
            else:
                way.pop()
        path = tuple(step.node for step in way[1:])
        return Verdict(path, random.categorical(_p(target, visit), position + len(path), Role.TARGET, 0))


def _next_child(tree: TokenTree, target: TargetDistributions, visit: _Visit) -> _Visit | None:
    """The next child that may be accepted, in draw order; ``None`` when the node has become a leaf.

    The child in hand, if any, has been rejected. Children with alpha 0 are passed over with all that is below them.
    """
    trials = tree.trials(visit.node)
    while True:
        _reject_in_hand(target, visit)
        if visit.tried == len(trials) or visit.alpha == 0.0:
            return None
        trial = trials[visit.tried]
        q = proposal_of(tree, trial)
        key = visit.node * TRIALS_PER_NODE + visit.tried
        visit.tried += 1
        visit.in_hand = trial, q
        alpha = flow(visit.alpha, _p(target, visit), q, trial.token)
        if alpha > 0.0:
            return _Visit(trial.child, key, alpha)


def _reject_in_hand(target: TargetDistributions, visit: _Visit) -> None:
    """Count the trial in hand as rejected."""
    if visit.in_hand is not None:
        trial, q = visit.in_hand
        visit.alpha, visit.p = after_rejection(visit.alpha, _p(target, visit), q, trial.token)
        visit.in_hand = None


def _p(target: TargetDistributions, visit: _Visit) -> Tensor:
    return target.probabilities(visit.node) if visit.p is None else visit.p
