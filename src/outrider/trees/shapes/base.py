"""The contract between a tree shape and the draft source that feeds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from outrider.errors import IllegalCombinationError
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, RandomStream, Role, Topology


class ShapeOptions(BaseModel):
    """Base of every shape's options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Candidates:
    """A draft source's opinion of what follows a node: best first.

    Attributes:
        tokens: token ids, best first; with ``probabilities`` set it may be empty until ``top`` is asked for.
        scores: one score in [0, 1] per token: the probability, or an n-gram's estimate of it.
        probabilities: the full distribution q [vocabulary] when the source can be sampled from, else ``None``.
    """

    tokens: Sequence[int] = ()
    scores: Sequence[float] = ()
    probabilities: Tensor | None = None

    def top(self, k: int) -> tuple[list[int], list[float]]:
        """The k best tokens and their scores; fewer when fewer are known or the rest has probability 0."""
        if self.probabilities is None:
            return list(self.tokens[:k]), list(self.scores[:k])
        values, tokens = torch.topk(self.probabilities, min(k, self.probabilities.shape[-1]))
        kept = int((values > 0).sum())
        return tokens[:kept].tolist(), values[:kept].tolist()

    @property
    def confidence(self) -> float:
        """The best score (0 when nothing is known): what confidence stops compare with their threshold."""
        if self.probabilities is not None:
            return float(self.probabilities.max())
        return self.scores[0] if self.scores else 0.0


class ChildSource(Protocol):
    """How a shape asks a drafter for the candidates below some nodes; one call is one draft forward."""

    name: str

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        """Candidates for each of ``nodes``, which were added since the last call or are the root."""
        ...


@dataclass(frozen=True, slots=True)
class GrowLimits:
    """Limits and keys of one tree.

    Attributes:
        max_nodes: nodes besides the root.
        max_depth: depth of the deepest node.
        position: output tokens kept before this step (part of the key of every draw).
        random: keyed draws, ``Role.DRAFT``.
    """

    max_nodes: int
    max_depth: int
    position: int
    random: RandomStream


class Shape(ABC):
    """Decides which nodes to expand and how many children each gets.

    ``proposal`` says how children are chosen: the best ones (deterministic), or draws from q with or without
    replacement. Class attributes: ``topology``, ``positional`` (the option that ``name:VALUE`` fills), ``summary``,
    ``source``.
    """

    Options: ClassVar[type[ShapeOptions]] = ShapeOptions
    topology: ClassVar[Topology]
    kinds: ClassVar[frozenset[ProposalKind]]
    positional: ClassVar[str | None] = None
    summary: ClassVar[str]
    source: ClassVar[str]

    def __init__(self, options: ShapeOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        if proposal not in self.kinds:
            allowed = ", ".join(sorted(k.value for k in self.kinds))
            raise IllegalCombinationError(
                f"shape {type(self).__name__} cannot make {proposal.value} proposals; it can make: {allowed}"
            )
        self.options = options
        self.proposal = proposal

    @property
    @abstractmethod
    def size(self) -> int:
        """Guesses that a tree of this shape holds at most."""

    def for_request(self) -> Shape:
        """The shape that one request uses: itself, or a copy with state of its own where a shape learns."""
        return self

    def observe(self, drafted: int, accepted: int) -> None:  # noqa: B027 - most shapes learn nothing
        """Learn how many guesses the last tree had and how many were accepted."""

    @abstractmethod
    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        """Grow a tree below ``root_token`` (the last committed token)."""


def add_children(
    tree: TokenTree, node: int, candidates: Candidates, count: int, source: str, limits: GrowLimits
) -> list[int]:
    """Propose up to ``count`` children of ``node`` as the tree's kind demands; returns the new nodes.

    Sampled kinds keep every drawn child: how many to draw is fixed before drawing, and the stop at the end of q's
    support depends on q alone. Draw keys are (position, node, index), so they never repeat within a request.
    """
    if tree.kind is ProposalKind.DETERMINISTIC:
        tokens, _ = candidates.top(count)
        before = len(tree)
        return [child for token in tokens if (child := tree.add(node, token, source)) >= before]
    q = candidates.probabilities
    if q is None:
        raise ValueError(f"draft source {source} has no distribution to draw from")
    row = tree.add_row(q)
    before = len(tree)
    remaining = q
    for index in range(count):
        if tree.kind is ProposalKind.WITHOUT_REPLACEMENT and float(remaining.sum()) <= 0.0:
            break
        token = limits.random.categorical(remaining, limits.position, Role.DRAFT, node * 4096 + index)
        tree.add(node, token, source, row)
        if tree.kind is ProposalKind.WITHOUT_REPLACEMENT:
            remaining = remaining.clone()
            remaining[token] = 0.0
    return list(range(before, len(tree)))
