"""Multi-step speculative sampling (SpecInfer, Miao et al. 2024, algorithm 2 and theorem 4.2), generic over proposals.

Children are tried in draw order against the target's distribution p. A trial drawn from q is accepted with probability
min(1, p(x) / q(x)); a rejection replaces p by norm[(p - q)+], the residual, and the next trial meets that. Draws
without replacement bring their renormalised q (Sequoia, Chen et al. 2024, algorithm 2); a deterministic trial is drawn
from a one-hot q, so it is accepted with probability p(x) and its rejection removes x from p. When every trial has
failed, or at a leaf, the next token is drawn from what p has become. Knows no model, cache or clock.
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


class MultiStep(Verifier):
    """Rejection sampling, child by child, exact for every kind of proposal."""

    exact_for: ClassVar[Exactness] = exactness(list(ProposalKind), list(Topology), list(Regime))
    summary = "recursive rejection sampling over a node's children, for drawn and deterministic guesses"
    source = "SpecInfer, Miao et al. 2024, arXiv:2305.09781, algorithm 2; Sequoia, Chen et al. 2024, arXiv:2402.12374"

    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            child, rest = self._try_children(tree, node, target.probabilities(node), random, position)
            if child is None:
                next_token = random.categorical(rest, position + len(path), Role.TARGET, 0)
                return Verdict(tuple(path), next_token)
            path.append(child)
            node = child

    def _try_children(
        self, tree: TokenTree, node: int, p: Tensor, random: RandomStream, position: int
    ) -> tuple[int | None, Tensor]:
        """The first accepted child, or ``None`` and the distribution [vocabulary] that the next token follows."""
        for index, trial in enumerate(tree.trials(node)):
            q = self.proposal_of(tree, trial)
            accept = float(p[trial.token])
            if q is not None:
                # p(x) > u q(x) with u uniform: the ratio as a probability, clipped at 1 by the stream; q(x) > 0 as x
                # was drawn from it.
                accept /= float(q[trial.token])
            if random.bernoulli(accept, position, Role.ACCEPT, node * TRIALS_PER_NODE + index):
                return trial.child, p
            residual = self.residual(p, q, trial.token)
            if residual is None:
                return trial.child, p
            p = residual
        return None, p

    def proposal_of(self, tree: TokenTree, trial: Trial) -> Tensor | None:
        """q that ``trial`` was drawn from, float64 [vocabulary] of sum 1; ``None`` for a one-hot."""
        return proposal_of(tree, trial)

    def residual(self, p: Tensor, q: Tensor | None, token: int) -> Tensor | None:
        """norm[(p - q)+], the law of the next token after ``token`` was rejected; ``q`` ``None`` is one-hot on it.

        ``None`` when nothing is left: p equals q but for rounding, so the rejection had a probability of about 0 and
        the trial counts as accepted.
        """
        if q is None:
            rest = p.clone()
            rest[token] = 0.0
        else:
            rest = (p - q).clamp_(min=0.0)
        mass = float(rest.sum())
        return rest / mass if mass > 0.0 else None
