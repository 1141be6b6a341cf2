"""Optimal transport by linear programming: the exact rule that accepts most often (SpecTr, arXiv:2310.15141).

The reference that rules for k independent draws are measured against. Only tokens that both p and q allow enter the
program (``transport.py``), and their number is limited, so that a request needs a small top-k. A single draw needs no
program: accept x with probability min(1, p(x) / q(x)). Knows no model, cache or clock.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from outrider.errors import InvalidOptionError
from outrider.sampling.params import SamplingParams
from outrider.types import Regime
from outrider.verifiers.iid import IidVerifier, NodeDraws
from outrider.verifiers.transport import Plan, plan, variables

MOST_VARIABLES = 25_000
"""Unknowns of one program; the solver takes some 60 ms for that many."""

_REMEMBERED_PLANS = 512


def largest_support(k: int) -> int:
    """Most tokens that ``k`` draws may be coupled over."""
    size = 1
    while variables(size + 1, k) <= MOST_VARIABLES:
        size += 1
    return size


class OptimalTransport(IidVerifier):
    """The coupling of a node's draws and the next token that hits a draw with the largest possible probability."""

    summary = "the optimal coupling of k independent draws by a linear program; reference, needs a small --top-k"
    source = "SpecTr, Sun et al. 2023, arXiv:2310.15141"

    def __init__(self) -> None:
        # The key is the program itself, so that a remembered plan is the one that would be found again.
        self._plans: OrderedDict[tuple[bytes, bytes, float, int], Plan] = OrderedDict()

    def admit(self, params: SamplingParams, vocab_size: int, draws: int) -> None:
        """Refuse a request whose target may allow more tokens than a node's ``draws`` can be coupled over.

        Raises:
            InvalidOptionError: naming the largest ``--top-k``.
        """
        if params.regime is Regime.GREEDY or draws < 2:
            return
        most = largest_support(draws)
        support = min(params.top_k or vocab_size, vocab_size)
        if support > most:
            raise InvalidOptionError(
                f"verifier 'optimal_transport' couples {draws} draws over at most {most} tokens and this request may "
                f"allow {support}; give --top-k {most} or less, a shape with fewer draws a node, or --verifier k_seq"
            )

    def select(self, p: Tensor, q: Tensor, tokens: list[int], draws: NodeDraws) -> tuple[int | None, Tensor]:
        if len(tokens) == 1:
            accepted = torch.minimum(p, q)
            if draws.passes(float(accepted[tokens[0]]) / float(q[tokens[0]]), 0):
                return tokens[0], p
            return None, _lacking(p, accepted)
        shared = torch.nonzero((p > 0) & (q > 0)).flatten()
        coupling = self._plan(p[shared], q[shared], float(q[p <= 0].sum()), len(tokens))
        index_of = {token: index for index, token in enumerate(shared.tolist())}
        drawn = tuple(sorted({index_of[token] for token in tokens if token in index_of}))
        if drawn:
            odds = torch.from_numpy(coupling.choice[drawn])
            refuse = (1.0 - odds.sum()).clamp(min=0.0)
            chosen = draws.choose(torch.cat([odds, refuse[None]]), 0)
            if chosen < len(drawn):
                return int(shared[drawn[chosen]]), p
        accepted = torch.zeros_like(p)
        accepted[shared] = torch.from_numpy(coupling.accepted).to(p.device)
        return None, _lacking(p, accepted)

    def _plan(self, p: Tensor, q: Tensor, q_other: float, k: int) -> Plan:
        """The coupling of ``k`` draws over the shared tokens, p and q float64 [shared]; ``q_other`` is q elsewhere."""
        if variables(len(p), k) > MOST_VARIABLES:
            raise InvalidOptionError(
                f"verifier 'optimal_transport' cannot couple {k} draws a node over {len(p)} tokens; "
                f"give --top-k {largest_support(k)} or less, or a shape with fewer draws a node"
            )
        p_array, q_array = p.cpu().numpy(), q.cpu().numpy()
        key = (p_array.tobytes(), q_array.tobytes(), q_other, k)
        found = self._plans.get(key)
        if found is None:
            found = plan(p_array, q_array, q_other, k)
            self._plans[key] = found
            if len(self._plans) > _REMEMBERED_PLANS:
                self._plans.popitem(last=False)
        return found


def _lacking(p: Tensor, accepted: Tensor) -> Tensor:
    """Weights of the next token after a refusal: p less what acceptances emit; p itself when that is all of it."""
    rest = (p - accepted).clamp_(min=0.0)
    return rest if float(rest.sum()) > 0.0 else p
