"""The contract between a tree shape and the draft source that feeds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from outrider.errors import IllegalCombinationError
from outrider.trees.token_tree import TRIALS_PER_NODE, TokenTree
from outrider.types import ProposalKind, RandomStream, Role, Topology

FloatArray = NDArray[np.float64]


class ShapeOptions(BaseModel):
    """Base of every shape's options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Candidates:
    """A draft source's opinion of what follows a node: best first.

    Attributes:
        tokens: different token ids, best first; with ``probabilities`` set it may be empty until ``top`` is asked for.
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

    def score_of(self, token: int) -> float:
        """The score of one candidate.

        Raises:
            ValueError: when it is none.
        """
        if self.probabilities is not None:
            return float(self.probabilities[token])
        return self.scores[list(self.tokens).index(token)]

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
class RankedChildren:
    """The best children of several nodes, one after the other: what a shape that looks at thousands of them works on.

    Attributes:
        owners: int64 [m], ascending: which of the nodes asked about (its index) a child belongs to.
        tokens: int64 [m], best first within an owner.
        scores: float64 [m], above 0 and at most 1.
    """

    owners: NDArray[np.int64]
    tokens: NDArray[np.int64]
    scores: NDArray[np.float64]


class BatchSource(ABC):
    """What a ``ChildSource`` with a model behind it can do besides: rank many nodes at once, follow a renumbering.

    A base class and no protocol: shapes ask for it at every draft pass, and asking for a protocol takes 80 us.
    """

    @abstractmethod
    def ranked(self, tree: TokenTree, nodes: Sequence[int], k: int, least: FloatArray | None = None) -> RankedChildren:
        """As ``candidates``, then the ``k`` best of each, without a Python object for a node.

        ``least``, float64 [len(nodes)]: a node's children that score less may be left out.
        """

    @abstractmethod
    def renumber(self, new_index: Mapping[int, int]) -> None:
        """The shape returns another tree than the one it asked about: node -> its index there; others are not in it."""


def ranked_children(
    source: ChildSource, tree: TokenTree, nodes: Sequence[int], k: int, least: FloatArray | None = None
) -> RankedChildren:
    """The ``k`` best candidates below each of ``nodes``; one call of ``source``, batched where it can.

    ``least``, float64 [len(nodes)]: a node's children that score less may be left out.
    """
    if isinstance(source, BatchSource):
        return source.ranked(tree, nodes, k, least)
    return rank_candidates(source.candidates(tree, nodes), k)


def rank_candidates(candidates: Sequence[Candidates], k: int) -> RankedChildren:
    """The ``k`` best of each, in one selection when all have distributions."""
    rows = [known.probabilities for known in candidates if known.probabilities is not None]
    if rows and len(rows) == len(candidates):
        return rank_rows(*torch.topk(torch.stack(rows), min(k, rows[0].shape[-1])))
    best = [(*pair, owner) for owner, known in enumerate(candidates) for pair in zip(*known.top(k), strict=True)]
    found = [(token, score, owner) for token, score, owner in best if score > 0.0]
    return RankedChildren(
        np.array([owner for _, _, owner in found], dtype=np.int64),
        np.array([token for token, _, _ in found], dtype=np.int64),
        np.array([score for _, score, _ in found], dtype=np.float64),
    )


def rank_rows(scores: Tensor, tokens: Tensor) -> RankedChildren:
    """Sorted scores and their tokens, both [nodes, k]; those of score 0 are left out."""
    values = scores.cpu().numpy()
    is_known = values > 0.0
    owners = np.nonzero(is_known)[0].astype(np.int64)
    return RankedChildren(owners, tokens.cpu().numpy()[is_known], values[is_known].astype(np.float64))


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
    replacement. Class attributes: ``topology``, ``positional`` (the option that ``name:VALUE`` fills), ``scores``
    (whether its trees tell their paths' probabilities), ``summary``, ``source``.
    """

    Options: ClassVar[type[ShapeOptions]] = ShapeOptions
    topology: ClassVar[Topology]
    kinds: ClassVar[frozenset[ProposalKind]]
    positional: ClassVar[str | None] = None
    scores: ClassVar[bool] = False
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

    @property
    def most_children(self) -> int:
        """Children that are drawn or chosen below one node at most."""
        return self.size

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
        token = limits.random.categorical(remaining, limits.position, Role.DRAFT, node * TRIALS_PER_NODE + index)
        tree.add(node, token, source, row)
        if tree.kind is ProposalKind.WITHOUT_REPLACEMENT:
            remaining = remaining.clone()
            remaining[token] = 0.0
    return list(range(before, len(tree)))
