"""What the rules for k independent draws share: the walk, the draws of a node, and the keys of the accept tests.

The rule sees all draws of a node at once, with the one q that they came from. Their number must be fixed before the
first of them is drawn (as every shape does): k tells the rule what could have been drawn. Knows no model, cache or
clock.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from outrider.sampling.draw import RandomStream, Role
from outrider.trees.token_tree import TRIALS_PER_NODE, TokenTree
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import (
    Exactness,
    TargetDistributions,
    Verdict,
    Verifier,
    exactness,
    proposal_of,
)


@dataclass(frozen=True, slots=True)
class NodeDraws:
    """The ``Role.ACCEPT`` decisions of one node, by index."""

    random: RandomStream
    position: int
    node: int

    def passes(self, probability: float, index: int) -> bool:
        """True with ``probability``."""
        return self.random.bernoulli(probability, self.position, Role.ACCEPT, self.node * TRIALS_PER_NODE + index)

    def choose(self, weights: Tensor, index: int) -> int:
        """An index of ``weights``, float64 [n], in proportion."""
        return self.random.categorical(weights, self.position, Role.ACCEPT, self.node * TRIALS_PER_NODE + index)


class IidVerifier(Verifier):
    """A rule that judges all draws of a node together, from the root down."""

    exact_for: ClassVar[Exactness] = exactness([ProposalKind.IID], list(Topology), list(Regime))

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            rest = target.probabilities(node)
            token: int | None = None
            if tree.trials(node):
                tokens, q = draws_of(tree, node)
                token, rest = self.select(rest, q, tokens, NodeDraws(random, position, node))
            if token is None:
                return Verdict(tuple(path), random.categorical(rest, position + len(path), Role.TARGET, 0))
            node = tree.children(node)[token]
            path.append(node)

    @abstractmethod
    def select(self, p: Tensor, q: Tensor, tokens: list[int], draws: NodeDraws) -> tuple[int | None, Tensor]:
        """Judge one node.

        Args:
            p, q: target's and draft's distributions, float64 [vocabulary].
            tokens: at least one draw from q, repetitions kept, in draw order.
            draws: the node's random decisions.

        Returns:
            The token of ``tokens`` to accept, and p; or ``None`` and weights [vocabulary] to draw the next token from.
        """


def draws_of(tree: TokenTree, node: int) -> tuple[list[int], Tensor]:
    """The tokens drawn at ``node``, repetitions kept, and their q, float64 [vocabulary] of sum 1.

    Raises:
        ValueError: when they are not draws with replacement from one distribution.
    """
    trials = tree.trials(node)
    rows = {trial.row for trial in trials}
    q = proposal_of(tree, trials[0])
    if q is None or len(rows) != 1 or any(trial.excluded for trial in trials):
        raise ValueError(f"the children of node {node} are not independent draws from one distribution")
    return [trial.token for trial in trials], q
