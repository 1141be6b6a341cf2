"""k-sequential selection (SpecTr, Sun et al. 2023, arXiv:2310.15141): every one of k draws meets the same test.

Draw x passes with probability min(1, p(x) / (rho q(x))), the first that passes is accepted, and otherwise the next
token follows the residual: what p still lacks. With beta = sum over x of min(p(x) / rho, q(x)) one draw passes with
probability beta, so x is accepted with probability min(p(x) / rho, q(x)) * (1 - (1 - beta)^k) / beta, which must not
exceed p(x). That holds from a smallest rho in [1, k] on; smaller accepts more, so the smallest is taken, found by
bisection and rounded up. Knows no model, cache or clock.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from outrider.verifiers.iid import IidVerifier, NodeDraws

_HALVINGS = 32
"""Every rho above the smallest is exact too; being (k - 1) / 2^32 above it costs less acceptance than that."""


class KSequential(IidVerifier):
    """SpecTr's rule, exact for independent draws from one q; one draw is standard speculative sampling."""

    summary = "k-sequential selection: k independent draws of a node meet one test, near-optimal transport"
    source = "SpecTr, Sun et al. 2023, arXiv:2310.15141"

    def select(self, p: Tensor, q: Tensor, tokens: list[int], draws: NodeDraws) -> tuple[int | None, Tensor]:
        passed = torch.minimum(p / rho(p, q, len(tokens)), q)
        for index, token in enumerate(tokens):
            # q(x) > 0 as x was drawn from it.
            if draws.passes(float(passed[token]) / float(q[token]), index):
                return token, p
        rest = residual(p, passed, len(tokens))
        # Nothing is left when p equals q but for rounding: all draws failed with a probability of about 0, and p itself
        # is a law that never gives an impossible token.
        return None, rest if float(rest.sum()) > 0.0 else p


def rho(p: Tensor, q: Tensor, k: int) -> float:
    """The smallest valid divisor in [1, ``k``] for ``k`` draws, rounded up; ``p`` and ``q`` are float64 [vocabulary].

    Bisection on 1 - (1 - beta)^k <= rho * beta, which fails below the answer and holds from it on.
    """
    if k == 1:
        return 1.0
    # min(p / rho, q) is p / rho for every rho >= 1 where p <= q, and q for every rho <= k where p >= k q: only the
    # tokens between need a look at each halving.
    lower = p <= q
    upper = (p >= k * q) & ~lower
    divided, fixed = float(p[lower].sum()), float(q[upper].sum())
    between = ~(lower | upper)
    between_p, between_q = p[between].cpu().numpy(), q[between].cpu().numpy()

    def is_valid(rate: float) -> bool:
        beta = divided / rate + fixed + float(np.minimum(between_p / rate, between_q).sum())
        return _any_of(beta, k) <= rate * beta

    if is_valid(1.0):
        return 1.0
    low, high = 1.0, float(k)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_valid(middle) else (middle, high)
    return high


def residual(p: Tensor, passed: Tensor, k: int) -> Tensor:
    """Weights [vocabulary] of the next token after ``k`` draws failed, of sum (1 - beta)^k.

    ``passed`` is min(p / rho, q), what one draw accepts of every token.
    """
    beta = float(passed.sum())
    if beta <= 0.0:
        return p
    return (p - passed * (_any_of(beta, k) / beta)).clamp_(min=0.0)


def acceptance(p: Tensor, q: Tensor, k: int) -> float:
    """Probability that one of ``k`` draws is accepted."""
    return _any_of(float(torch.minimum(p / rho(p, q, k), q).sum()), k)


def lower_bound(p: Tensor, q: Tensor, k: int) -> float:
    """The acceptance at rho = ``k``, valid for every pair, and so never more than ``acceptance``.

    The paper's guarantee follows from it: no rule that accepts one of k draws reaches more than
    min(1, sum of min(p, k q)) = min(1, k beta), and 1 - (1 - beta)^k is at least 1 - (1 - 1/k)^k > 1 - 1/e times that.
    """
    return _any_of(float(torch.minimum(p / k, q).sum()), k)


def _any_of(beta: float, k: int) -> float:
    """1 - (1 - beta)^k, without cancellation for a small beta."""
    return 1.0 if beta >= 1.0 else -math.expm1(k * math.log1p(-beta))
