"""One node, k guesses: random pairs of distributions, and the law of a production verifier on them by enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.trees.shapes.base import Candidates, GrowLimits, add_children
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind
from outrider.verifiers.base import Verifier

Pair = tuple[Tensor, Tensor]


def row(*values: float) -> Tensor:
    """float64 [len(values)]."""
    return torch.tensor(values, dtype=torch.float64)


DEGENERATE: dict[str, Pair] = {
    "equal": (row(0.5, 0.3, 0.2), row(0.5, 0.3, 0.2)),
    "nearly equal": (row(0.5, 0.3, 0.2), row(0.5 - 1e-15, 0.3, 0.2 + 1e-15)),
    "disjoint": (row(0.6, 0.4, 0.0, 0.0), row(0.0, 0.0, 0.3, 0.7)),
    "one-hot p inside q": (row(0.0, 1.0, 0.0), row(0.2, 0.5, 0.3)),
    "one-hot p outside q": (row(0.0, 1.0, 0.0), row(0.6, 0.0, 0.4)),
    "one-hot p and q": (row(0.0, 1.0, 0.0), row(0.0, 1.0, 0.0)),
    "one-hot q": (row(0.2, 0.5, 0.3), row(0.0, 1.0, 0.0)),
    "tiny q": (row(0.2, 0.5, 0.3), row(1e-13, 1.0 - 2e-13, 1e-13)),
    "tiny p": (row(1.0 - 1e-13, 1e-13, 0.0), row(1e-14, 0.4, 0.6 - 1e-14)),
    "uniform q": (row(0.7, 0.1, 0.1, 0.1), row(0.25, 0.25, 0.25, 0.25)),
}


def random_pairs(count: int, seed: int, sizes: Sequence[int] = (3, 4, 5)) -> Iterator[Pair]:
    """Peaked and flat distributions, near and far from each other, a third of them with zeros."""
    source = np.random.default_rng(seed)
    for index in range(count):
        size = sizes[index % len(sizes)]
        p, q = (source.dirichlet(np.full(size, source.choice([0.2, 0.7, 3.0]))) for _ in range(2))
        if index % 3 == 0:
            p[source.integers(size)] = 0.0
            q[source.integers(size)] = 0.0
        if index % 4 == 0:
            q = 0.7 * p + 0.3 * q
        yield torch.from_numpy(p / p.sum()), torch.from_numpy(q / q.sum())


class FirstOnly:
    """p at the root; below, always token 0, so that an enumeration ends there."""

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def probabilities(self, node: int) -> Tensor:
        return self.p if node == 0 else torch.eye(len(self.p), dtype=torch.float64)[0]

    def greedy_token(self, node: int) -> int:
        return int(self.probabilities(node).argmax())


def one_node(q: Tensor, k: int, kind: ProposalKind, stream: EnumeratingStream) -> TokenTree:
    """A root with ``k`` children as production draws them."""
    tree = TokenTree(0, kind)
    add_children(tree, 0, Candidates(probabilities=q), k, "draft", GrowLimits(64, 8, 2, stream))
    return tree


def first_token(verifier: Verifier, p: Tensor, q: Tensor, k: int, kind: ProposalKind) -> tuple[Tensor, float]:
    """Law [vocabulary] of the first output token, and the probability that it is an accepted guess."""
    law, accepted = torch.zeros_like(p), 0.0

    def step(stream: EnumeratingStream) -> tuple[int, bool]:
        tree = one_node(q, k, kind, stream)
        verdict = verifier.verify(tree, FirstOnly(p), stream, 2)
        return (tree.tokens[verdict.path[0]], True) if verdict.path else (verdict.next_token, False)

    for (token, is_guess), probability in outcomes(step):
        law[token] += probability
        accepted += probability * is_guess
    return law, accepted


def distance(p: Tensor, law: Tensor) -> float:
    """Total variation."""
    return 0.5 * float((p - law).abs().sum())
