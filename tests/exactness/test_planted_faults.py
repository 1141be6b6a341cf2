"""Mistakes that look right, planted one at a time: the enumeration must notice each (reference/systems.md, 0.2).

A fault is either a change of the tree between drafting and verifying, or a changed verifier. The same trees without the
fault pass, so it is the fault that is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream
from outrider.audit.law import KEPT, Source, Tamper, World, limits, total_variation
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree, Trial
from outrider.types import ProposalKind
from outrider.verifiers.multi_step import MultiStep

DETERMINISTIC, IID, WOR = ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT
WIDTHS = (3, 1)
CAUGHT = 1e-3

Edit = Callable[[TokenTree, Sequence[Trial]], Sequence[Trial]]


def grow(kind: ProposalKind, where: World, stream: EnumeratingStream) -> TokenTree:
    shape = Widths(WidthsOptions(widths=WIDTHS), kind)
    return shape.grow(KEPT[-1], Source(where, kind), limits(stream))


def distance(kind: ProposalKind, tamper: Tamper | None, verifier: MultiStep | None = None) -> float:
    hot = SamplingParams(temperature=1.0)
    where = World(3, SamplingParams(temperature=0.7), hot)
    return total_variation(where, verifier or MultiStep(), partial(grow, kind), len(WIDTHS) + 1, tamper)


def rebuilt(tree: TokenTree, edit: Edit, rows: list[Tensor] | None = None) -> TokenTree:
    """``tree`` with every node's trials passed through ``edit``; dropped children go with all that is below them."""
    copy = TokenTree(tree.tokens[0], tree.kind)
    copy.rows = tree.rows if rows is None else rows
    new_index = {0: 0}
    for node in range(len(tree)):
        for trial in edit(tree, tree.trials(node)) if node in new_index else ():
            new_index[trial.child] = copy.graft(new_index[node], trial, trial.row, "draft")
    return copy


def sort_by_q(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: sorted(trials, key=lambda x: -float(t.rows[x.row or 0][x.token])))


def sort_by_token(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: sorted(trials, key=lambda x: x.token))


def try_duplicates_once(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: list({x.token: x for x in reversed(trials)}.values())[::-1])


def forget_exclusions(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: [Trial(x.child, x.token, x.row) for x in trials])


def drop_unlikely(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: [x for x in trials if float(t.rows[x.row or 0][x.token]) >= 0.3])


def q_of_another_temperature(tree: TokenTree) -> TokenTree:
    rows = [row**2 / (row**2).sum() for row in tree.rows]
    return rebuilt(tree, lambda t, trials: trials, rows)


def treat_best_children_as_drawn(tree: TokenTree) -> TokenTree:
    """Deterministic children verified with p/q, q being the uniform distribution say."""
    rows = [torch.full((3,), 1 / 3, dtype=torch.float64)]
    return rebuilt(tree, lambda t, trials: [Trial(x.child, x.token, 0) for x in trials], rows)


def renormalise_iid(tree: TokenTree) -> TokenTree:
    def edit(tree: TokenTree, trials: Sequence[Trial]) -> list[Trial]:
        before = [tuple(y.token for y in trials[:i] if y.token != x.token) for i, x in enumerate(trials)]
        return [Trial(x.child, x.token, x.row, excluded) for x, excluded in zip(trials, before, strict=True)]

    return rebuilt(tree, edit)


class ResidualNotNormalised(MultiStep):
    def residual(self, p: Tensor, q: Tensor | None, token: int) -> Tensor | None:
        rest = super().residual(p, q, token)
        return None if rest is None else rest * float((p - (0.0 if q is None else q)).clamp(min=0.0).sum())


class RejectionKeepsP(MultiStep):
    def residual(self, p: Tensor, q: Tensor | None, token: int) -> Tensor | None:
        return p


class AcceptsEverything(MultiStep):
    """As if every draft had come from the target itself."""

    def proposal_of(self, tree: TokenTree, trial: Trial) -> Tensor | None:
        q = super().proposal_of(tree, trial)
        return None if q is None else torch.full_like(q, 1e-3)


@pytest.mark.parametrize("kind", [DETERMINISTIC, IID, WOR])
def test_without_a_fault_the_law_is_exact(kind: ProposalKind) -> None:
    assert distance(kind, None) < 1e-12
    assert distance(kind, lambda tree: rebuilt(tree, lambda t, trials: trials)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "tamper"),
    [
        (IID, sort_by_q),
        (WOR, sort_by_q),
        (WOR, sort_by_token),
        (IID, try_duplicates_once),
        (IID, renormalise_iid),
        (WOR, forget_exclusions),
        (IID, drop_unlikely),
        (WOR, drop_unlikely),
        (IID, q_of_another_temperature),
        (WOR, q_of_another_temperature),
        (DETERMINISTIC, treat_best_children_as_drawn),
    ],
)
def test_tampering_with_the_tree_is_caught(kind: ProposalKind, tamper: Tamper) -> None:
    assert distance(kind, tamper) > CAUGHT


@pytest.mark.parametrize("kind", [IID, WOR])
@pytest.mark.parametrize("verifier", [ResidualNotNormalised, RejectionKeepsP, AcceptsEverything])
def test_a_wrong_verifier_is_caught(verifier: type[MultiStep], kind: ProposalKind) -> None:
    assert distance(kind, None, verifier()) > CAUGHT
