"""Block verification of a chain (Sun et al. 2025, arXiv:2403.10444): judge the guesses together, longest prefix first.

With p the target's and q the proposal's distribution, P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)) for the guesses
x_1..x_n. A prefix of i < n guesses is kept with probability h_i = S_i / (S_i + 1 - P_i), S_i = sum over x of
[P_i p(x) - q(x)]+ after that prefix; the whole chain with probability P_n. The longest kept prefix stands. The token
after it is drawn from norm[P_i p - q]+, or from p after the whole chain. A deterministic guess has a one-hot q, which
makes the rule token by token verification. Knows no model, cache or clock, and nothing of branches.
"""

from __future__ import annotations

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


class Block(Verifier):
    """Accept the longest prefix that passes its test; at least as many guesses as token by token, on average."""

    exact_for: ClassVar[Exactness] = exactness(
        [ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT],
        [Topology.CHAIN],
        list(Regime),
    )
    summary = "a chain judged as a whole, longest prefix first; on average no fewer guesses kept than token by token"
    source = "Block verification, Sun et al. 2025, arXiv:2403.10444"

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        chain = _trials_of_chain(tree)
        ratios = [1.0]  # P_0, P_1, ...
        for node, trial in enumerate(chain):
            ratio = flow(ratios[-1], target.probabilities(node), proposal_of(tree, trial), trial.token)
            if ratio == 0.0:  # neither this guess nor what follows it can be kept
                break
            ratios.append(ratio)
        for node in range(len(ratios) - 1, -1, -1):
            keep, p = ratios[node], target.probabilities(node)
            if node < len(chain):
                keep, p = after_rejection(keep, p, proposal_of(tree, chain[node]), chain[node].token)
            # The empty prefix needs no test, and the key of a test is that of its last guess: (parent, trial 0).
            if node == 0 or random.bernoulli(keep, position, Role.ACCEPT, (node - 1) * TRIALS_PER_NODE):
                break
        return Verdict(tuple(range(1, node + 1)), random.categorical(p, position + node, Role.TARGET, 0))


def _trials_of_chain(tree: TokenTree) -> list[Trial]:
    """The only trial below each node but the last."""
    trials = [tree.trials(node) for node in range(len(tree))]
    if tree.topology is not Topology.CHAIN or any(len(found) != 1 for found in trials[:-1]):
        raise ValueError("block verification needs a chain with one draw per node")
    return [found[0] for found in trials[:-1]]


def flow(alpha: float, p: Tensor, q: Tensor | None, token: int) -> float:
    """min(1, alpha p(token) / q(token)): how surely the target goes through a proposed child.

    Args:
        alpha: the same probability for the node above it, in [0, 1].
        p, q: [vocabulary] at that node; ``q`` ``None`` is one-hot on ``token``.
    """
    mass = alpha * float(p[token])
    return min(1.0, mass if q is None else mass / float(q[token]))


def after_rejection(alpha: float, p: Tensor, q: Tensor | None, token: int) -> tuple[float, Tensor]:
    """A node's acceptance probability and next-token law once its child ``token`` (with all below it) was rejected.

    Returns:
        S / (S + 1 - alpha) and norm[alpha p - q]+ with S the sum of [alpha p - q]+; arguments as in ``flow``. Without
        a residual (S = 0) ``p`` comes back as it was: for alpha < 1 the node is then rejected surely, and for
        alpha = 1, where p equals q but for rounding, the rejection had a probability of about 0.
    """
    if q is None:
        rest = alpha * p
        rest[token] = 0.0
    else:
        rest = (alpha * p).sub_(q).clamp_(min=0.0)
    mass = float(rest.sum())
    if mass <= 0.0:
        return (1.0 if alpha == 1.0 else 0.0), p
    # The bracket keeps alpha = 1 exactly 1: such a node is never rejected.
    return mass / (mass + (1.0 - alpha)), rest.div_(mass)
