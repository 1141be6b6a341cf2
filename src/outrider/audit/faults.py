"""Mistakes that look right, planted one at a time: the exact audit must notice each (or it would not notice yours).

A fault is either a change of the tree between drafting and verifying, or a changed verifier; the mistakes are those by
which real systems bias their output while their acceptance rate stays or rises. Each is measured on trees of widths
3,1 over three tokens; without the fault the same trees give the target's law. Knows nothing of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream
from outrider.audit.law import KEPT, Source, Tamper, World, limits, total_variation
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree, Trial
from outrider.types import ProposalKind
from outrider.verifiers.base import Verifier
from outrider.verifiers.multi_step import MultiStep

DETERMINISTIC, IID, WOR = ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT
WIDTHS = (3, 1)
CAUGHT = 1e-3
"""Total variation above which a fault counts as caught: far above rounding, below the smallest planted bias."""

Edit = Callable[[TokenTree, Sequence[Trial]], Sequence[Trial]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted mistake on one kind of proposal: a change of the tree, or of the verifier."""

    name: str
    kind: ProposalKind
    description: str
    tamper: Tamper | None = None
    verifier: type[Verifier] = MultiStep

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}"


@dataclass(frozen=True, slots=True)
class FaultRow:
    """What the exact audit made of a planted fault; ``distance`` is the total variation that it causes."""

    name: str
    kind: ProposalKind
    distance: float
    caught: bool


def fault_audit() -> list[FaultRow]:
    """Measure every planted fault."""
    rows = []
    for fault in FAULTS:
        distance = fault_distance(fault)
        rows.append(FaultRow(fault.name, fault.kind, distance, distance > CAUGHT))
    return rows


def fault_distance(fault: Fault) -> float:
    """Total variation between the faulty output law and the target's."""
    return distance(fault.kind, fault.tamper, fault.verifier())


def distance(kind: ProposalKind, tamper: Tamper | None = None, verifier: Verifier | None = None) -> float:
    """The same for any change of the trees and any verifier (``multi_step`` by default)."""
    where = World(3, SamplingParams(temperature=0.7), SamplingParams(temperature=1.0))
    return total_variation(where, verifier or MultiStep(), partial(_grow, kind), len(WIDTHS) + 1, tamper)


def _grow(kind: ProposalKind, where: World, stream: EnumeratingStream) -> TokenTree:
    shape = Widths(WidthsOptions(widths=WIDTHS), kind)
    return shape.grow(KEPT[-1], Source(where, kind), limits(stream))


# -- changes of the tree -----------------------------------------------------------------------------------------


def rebuilt(tree: TokenTree, edit: Edit, rows: list[Tensor] | None = None) -> TokenTree:
    """``tree`` with every node's trials passed through ``edit``; dropped children go with all that is below them."""
    copy = TokenTree(tree.tokens[0], tree.kind)
    copy.rows = tree.rows if rows is None else rows
    new_index = {0: 0}
    for node in range(len(tree)):
        for trial in edit(tree, tree.trials(node)) if node in new_index else ():
            new_index[trial.child] = copy.graft(new_index[node], trial, trial.row, "draft")
    return copy


def unchanged(tree: TokenTree) -> TokenTree:
    """No fault: the same trials in the same order, through the same rebuilding."""
    return rebuilt(tree, lambda t, trials: trials)


def _probability(tree: TokenTree, trial: Trial) -> float:
    return float(tree.rows[trial.row or 0][trial.token])


def sort_by_q(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: sorted(trials, key=lambda x: -_probability(t, x)))


def sort_by_token(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: sorted(trials, key=lambda x: x.token))


def try_duplicates_once(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: list({x.token: x for x in reversed(trials)}.values())[::-1])


def forget_exclusions(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: [Trial(x.child, x.token, x.row) for x in trials])


def drop_unlikely(tree: TokenTree) -> TokenTree:
    return rebuilt(tree, lambda t, trials: [x for x in trials if _probability(t, x) >= 0.3])


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


# -- changes of the verifier -------------------------------------------------------------------------------------


class ResidualNotNormalised(MultiStep):
    """The next trial meets too small a p."""

    def residual(self, p: Tensor, q: Tensor | None, token: int) -> Tensor | None:
        rest = super().residual(p, q, token)
        return None if rest is None else rest * float((p - (0.0 if q is None else q)).clamp(min=0.0).sum())


class RejectionKeepsP(MultiStep):
    """The mass that was already offered is counted again."""

    def residual(self, p: Tensor, q: Tensor | None, token: int) -> Tensor | None:
        return p


class AcceptsEverything(MultiStep):
    """As if every draft had come from the target itself."""

    def proposal_of(self, tree: TokenTree, trial: Trial) -> Tensor | None:
        q = super().proposal_of(tree, trial)
        return None if q is None else torch.full_like(q, 1e-3)


_RESORTED = "drawn children re-sorted by q before they are tried"
_DROPPED = "a drawn child dropped for its low confidence"
_TEMPERATURE = "drafts drawn at one temperature, q taken at another"
_RESIDUAL = "residual not normalised between trials"

FAULTS: tuple[Fault, ...] = (
    Fault("ResidualNotNormalised", IID, _RESIDUAL, verifier=ResidualNotNormalised),
    Fault("ResidualNotNormalised", WOR, _RESIDUAL, verifier=ResidualNotNormalised),
    Fault("q_of_another_temperature", IID, _TEMPERATURE, q_of_another_temperature),
    Fault("q_of_another_temperature", WOR, _TEMPERATURE, q_of_another_temperature),
    Fault("sort_by_q", IID, _RESORTED, sort_by_q),
    Fault("sort_by_q", WOR, _RESORTED, sort_by_q),
    Fault("sort_by_token", WOR, "drawn children re-sorted by token id", sort_by_token),
    Fault("try_duplicates_once", IID, "a token drawn twice with replacement is tried once", try_duplicates_once),
    Fault("renormalise_iid", IID, "draws with replacement verified with a renormalised q", renormalise_iid),
    Fault("forget_exclusions", WOR, "draws without replacement verified with a q not renormalised", forget_exclusions),
    Fault("drop_unlikely", IID, _DROPPED, drop_unlikely),
    Fault("drop_unlikely", WOR, _DROPPED, drop_unlikely),
    Fault(
        "treat_best_children_as_drawn",
        DETERMINISTIC,
        "best-first children verified as if they had been drawn",
        treat_best_children_as_drawn,
    ),
    Fault("RejectionKeepsP", IID, "a rejection leaves p as it was", verifier=RejectionKeepsP),
    Fault("RejectionKeepsP", WOR, "a rejection leaves p as it was", verifier=RejectionKeepsP),
    Fault("AcceptsEverything", IID, "guesses accepted as if the target had made them", verifier=AcceptsEverything),
    Fault("AcceptsEverything", WOR, "guesses accepted as if the target had made them", verifier=AcceptsEverything),
)
