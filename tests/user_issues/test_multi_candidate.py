"""Several candidates for one position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.tiny_engines import Law, distance
from outrider.audit.enumeration import EnumeratingStream, output_law
from outrider.engine.registry import VERIFIERS, load_class
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Verifier
from user_issues.toy_decoding import chain_law

A, B, C, D, E, F = range(6)
ROWS = [[0.0] * 6 for _ in range(7)]
ROWS[6][A] = ROWS[6][E] = 0.5  # row 6: the root
ROWS[A][B], ROWS[A][C], ROWS[A][D] = 0.2, 0.3, 0.5
ROWS[E][F], ROWS[E][A] = 0.6, 0.4
for _token in (B, C, D, F):
    ROWS[_token][_token] = 1.0


class Table:
    """``TargetDistributions`` of the table at a tree's nodes."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree

    def probabilities(self, node: int) -> Tensor:
        return torch.tensor(ROWS[self.tree.tokens[node] if node else 6], dtype=torch.float64)

    def greedy_token(self, node: int) -> int:
        return int(self.probabilities(node).argmax())


def two_tokens(verifier: Verifier, tree: TokenTree) -> Law:
    """The law of the next two tokens: those of the verdict, then the target's own."""

    def verify(stream: EnumeratingStream) -> tuple[int, ...]:
        verdict = verifier.verify(tree, Table(tree), stream, 1)
        return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)[:2]

    law: Law = {}
    for tokens, mass in output_law(verify).items():
        for tail, share in chain_law(ROWS, tokens[-1], 2 - len(tokens)).items():
            law[(*tokens, *tail)] = law.get((*tokens, *tail), 0.0) + mass * share
    return law


FIT = [
    name
    for name in VERIFIERS
    if (ProposalKind.DETERMINISTIC, Topology.TREE, Regime.SAMPLED) in load_class("verifier", name).exact_for
]


@pytest.mark.parametrize("name", FIT)
def test_multi_candidate_joint_law_u22(name: str) -> None:
    """The best match among the drafts ab, ac, ad, ef was kept: more drafts begin with a, so a came too often.

    With p(a) = p(e) = 1/2 the pairs must come with the target's joint probabilities, in any order of the drafts.
    """
    assert {"multi_step", "sample_match"} <= set(FIT)
    drafts = [(A, B), (A, C), (A, D), (E, F)]
    expected = chain_law(ROWS, 6, 2)
    for order in (drafts, drafts[::-1]):
        tree = TokenTree(B)
        for first, second in order:
            tree.add(tree.add(0, first), second)
        law = two_tokens(load_class("verifier", name)(), tree)
        assert distance(law, expected) < 1e-12
        assert sum(mass for tokens, mass in law.items() if tokens[0] == A) == pytest.approx(0.5)
