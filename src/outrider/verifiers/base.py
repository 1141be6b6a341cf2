"""The contract of a verification rule. No model, no cache, no clock: it can be tested by enumeration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from pydantic import BaseModel
from torch import Tensor

from outrider.sampling.draw import RandomStream
from outrider.sampling.params import SamplingParams
from outrider.trees.token_tree import TokenTree, Trial
from outrider.types import ProposalKind, Regime, Topology

Exactness = frozenset[tuple[ProposalKind, Topology, Regime]]


class TargetDistributions(Protocol):
    """The target's processed distributions at a tree's nodes, computed when asked for (few nodes are visited)."""

    def probabilities(self, node: int) -> Tensor:
        """float64 [vocabulary], after all sampling parameters; one-hot at temperature 0. Must not be modified."""
        ...

    def greedy_token(self, node: int) -> int:
        """The best token after penalties and bias."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted nodes from the root down (root excluded), and the token that follows them."""

    path: tuple[int, ...]
    next_token: int


class Verifier(ABC):
    """A rule that decides which guesses stay so that the output law is the target's.

    A rule with options takes them, an instance of its ``Options``, as its constructor's only argument, with a default.

    Class attributes:
        Options, positional: a pydantic model of the rule's options, and the one that ``name:VALUE`` fills.
        exact_for: the (proposal kind, topology, regime) triples for which the law is exactly the target's.
        lossy: true for rules that must be asked for explicitly.
        seed_fixes_text: whether a seed gives plain sampling's text, whatever the tree; else the draws depend on it.
        summary, source: one line and a citation for ``outrider methods``.
    """

    Options: ClassVar[type[BaseModel] | None] = None
    positional: ClassVar[str | None] = None
    exact_for: ClassVar[Exactness]
    lossy: ClassVar[bool] = False
    seed_fixes_text: ClassVar[bool] = False
    summary: ClassVar[str]
    source: ClassVar[str]

    def admit(self, params: SamplingParams, vocab_size: int, draws: int) -> None:  # noqa: B027 - most rules take all
        """Refuse a request that this rule cannot serve, before anything runs; ``draws`` are a node's children at most.

        Raises:
            InvalidOptionError: saying which parameter is in the way.
        """

    @abstractmethod
    def verify(self, tree: TokenTree, target: TargetDistributions, random: RandomStream, position: int) -> Verdict:
        """Walk the tree.

        Args:
            tree: the proposal, with its trials in draw order.
            target: distributions at its nodes.
            random: keyed draws (``sampling/draw.py`` says which keys belong to whom).
            position: output tokens kept before this step.
        """


def exactness(kinds: Sequence[ProposalKind], topologies: Sequence[Topology], regimes: Sequence[Regime]) -> Exactness:
    """Every combination of the arguments."""
    return frozenset((k, t, r) for k in kinds for t in topologies for r in regimes)


def proposal_of(tree: TokenTree, trial: Trial) -> Tensor | None:
    """q that ``trial`` was drawn from, float64 [vocabulary] of sum 1; ``None`` for a one-hot."""
    if trial.row is None:
        return None
    q = tree.trial_distribution(trial)
    # The draw normalised in float64; a float32 q that sums to 1 + 1e-7 is not what was drawn from.
    return q if q.dtype == torch.float64 else q.double() / q.double().sum()
