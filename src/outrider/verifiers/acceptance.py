"""How often a rule accepts one of a node's guesses: exact figures for one position, from p and q alone.

For tables and tests: the rules are compared on the same rows without running a model or drawing a tree. ``p`` and ``q``
are float64 [vocabulary], the target's and the draft's distributions, each of sum 1; ``k`` is the number of guesses.
Every figure is exact and takes a few passes over the vocabulary, except draws without replacement for k >= 2, where q
depends on which tokens were refused: ``without_replacement`` sums over all of them (vocabulary^(k-1) passes, for small
ones), ``without_replacement_estimate`` over sampled ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.verifiers.k_seq import acceptance as k_sequential
from outrider.verifiers.transport import optimal_acceptance as optimal

__all__ = [
    "k_sequential",
    "multi_step",
    "optimal",
    "sample_match",
    "without_replacement",
    "without_replacement_estimate",
]


def sample_match(p: Tensor, q: Tensor, k: int) -> float:
    """Deterministic children, the ``k`` best tokens of ``q`` or all that it allows: the mass that ``p`` gives them.

    The same holds for ``multi_step`` on them.
    """
    best = torch.topk(q, min(k, len(q)))
    return float(p[best.indices[best.values > 0]].sum())


def multi_step(p: Tensor, q: Tensor, k: int) -> float:
    """``k`` independent draws: the residual after a refusal does not depend on the token that was refused."""
    refused = 1.0
    for _ in range(k):
        refused *= 1.0 - min(1.0, float(torch.minimum(p, q).sum()))
        rest = (p - q).clamp_(min=0.0)
        mass = float(rest.sum())
        if mass <= 0.0:
            return 1.0
        p = rest / mass
    return 1.0 - refused


def without_replacement(p: Tensor, q: Tensor, k: int) -> float:
    """``k`` draws without replacement, exactly: a sum over the tokens refused before the last draw."""
    return 1.0 - _all_refused(p, q, k)


def _all_refused(p: Tensor, q: Tensor, k: int) -> float:
    """Probability that ``k`` draws, or as many as q's support has, are all refused."""
    refusals = (q - p).clamp_(min=0.0)
    if k == 1:
        return float(refusals.sum())
    rest = (p - q).clamp_(min=0.0)
    mass = float(rest.sum())
    if mass <= 0.0:
        return 0.0
    total = 0.0
    for token in torch.nonzero(refusals).flatten().tolist():
        left = q.clone()
        left[token] = 0.0
        left_mass = float(left.sum())
        follow = 1.0 if left_mass <= 0.0 else _all_refused(rest / mass, left / left_mass, k - 1)
        total += float(refusals[token]) * follow
    return total


def without_replacement_estimate(p: Tensor, q: Tensor, most: int, paths: int = 16, seed: int = 0) -> list[float]:
    """Acceptance of 1 to ``most`` draws without replacement, [most], by sampling which tokens were refused.

    Along a path of refusals the chance of the next one is exact, so only the choice of the refused tokens is sampled:
    the first figure is exact and the others are unbiased. Time: most * paths passes over the tokens that p or q allow.
    """
    allowed = (p > 0) | (q > 0)
    rest, left = p[allowed].expand(paths, -1), q[allowed].expand(paths, -1)
    generator = torch.Generator(p.device).manual_seed(seed)
    refused = torch.ones(paths, dtype=torch.float64, device=p.device)
    figures = []
    for _ in range(most):
        refusals = (left - rest).clamp_(min=0.0)
        # A path whose q has nothing left makes no further trial.
        refused = refused * torch.where(left.any(dim=1), refusals.sum(dim=1), 1.0)
        figures.append(1.0 - float(refused.mean()))
        rest = _normalised((rest - left).clamp_(min=0.0))
        left = _normalised(left.scatter(1, _draw(refusals, generator), 0.0))
    return figures


def _normalised(rows: Tensor) -> Tensor:
    """Rows [n, vocabulary] divided by their sums; a row of zeros stays."""
    mass = rows.sum(dim=1, keepdim=True)
    return rows / torch.where(mass > 0, mass, 1.0)


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index [n, 1] per row of ``weights`` [n, vocabulary], in proportion; any index for a row of zeros."""
    cumulative = torch.cumsum(weights, dim=1)
    uniform = torch.rand(len(weights), 1, dtype=torch.float64, device=weights.device, generator=generator)
    found = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return found.clamp_(max=weights.shape[1] - 1)
