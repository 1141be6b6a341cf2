"""The contract of every model that Outrider runs, target or drafter.

One method, ``forward``, does prefill, plain decoding, tree verification and batches alike: a prompt is a tree without
branches, a batch is several segments. Rows are written to *scratch* slots behind a sequence's committed prefix;
``SequenceCache.commit`` keeps a path of them, ``rollback`` forgets them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.trees.token_tree import TokenTree
from outrider.trees.topology import ancestors_mask, is_chain

FINAL_HIDDEN = "final"
"""Name of the hidden state after the final norm; an integer names the input of that block."""

PREFILL_ROWS = 512
"""Rows of one pass over committed text: bounds what activations take."""

Sublayers = frozenset[int]
"""Sublayers of a model: ``2 * block`` is a block's attention, ``2 * block + 1`` its MLP."""

FULL: Sublayers = frozenset()
"""Nothing skipped."""


class SequenceCache(ABC):
    """One sequence's key/value entries: ``length`` committed ones, then ``scratch`` speculative ones.

    Not thread-safe. A cache belongs to the model that made it.
    """

    length: int = 0
    scratch: int = 0

    @abstractmethod
    def commit(self, slots: Sequence[int]) -> None:
        """Move scratch entries ``slots`` (indices from 0, in path order) behind the prefix; forget the other ones."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget committed entries from position ``length`` on, and all scratch entries.

        Raises:
            CacheRollbackError: when entries that the shorter state needs were already dropped (sliding window).
        """

    @abstractmethod
    def can_truncate(self, length: int) -> bool:
        """Whether ``truncate(length)`` would succeed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    def rollback(self) -> None:
        """Forget every scratch entry."""
        self.scratch = 0

    @contextmanager
    def speculation(self) -> Iterator[None]:
        """Everything written inside is rolled back on the way out unless ``commit`` was called.

        Stop strings, exceptions, disconnects and Ctrl-C all leave through here.
        """
        try:
            yield
        finally:
            self.rollback()


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows that one sequence contributes to a forward pass.

    Args:
        cache: where the rows' entries go: slots ``cache.scratch ... cache.scratch + n - 1`` behind the prefix.
        tokens: token ids [n].
        positions: absolute positions [n]; ``None`` continues the chain after the last scratch entry.
        mask: bool [n, scratch_before + n], which scratch entries and rows each row sees (itself included); the whole
            committed prefix is always visible (less what a sliding window hides). ``None`` is causal.
        logit_rows: rows whose logits are wanted; ``None`` for all, ``()`` for none.
    """

    cache: SequenceCache
    tokens: Sequence[int]
    positions: Sequence[int] | None = None
    mask: NDArray[np.bool_] | None = None
    logit_rows: Sequence[int] | None = None

    def resolved_positions(self) -> list[int]:
        """``positions`` with the default filled in, [n]."""
        if self.positions is not None:
            return list(self.positions)
        start = self.cache.length + self.cache.scratch
        return list(range(start, start + len(self.tokens)))


@dataclass(frozen=True, slots=True)
class SegmentOutput:
    """What a forward pass returns for one segment.

    Attributes:
        logits: float tensor [len(logit_rows), vocab_size].
        hidden: requested hidden states by name, each [n, hidden_size], for all rows.
    """

    logits: Tensor
    hidden: dict[str | int, Tensor] = field(default_factory=dict)


class LanguageModel(ABC):
    """A causal language model with roll-back-able state.

    Attributes:
        vocab_size: rows of the head, padding included.
        context_length: positions at most (prompt and output together).
        num_layers: transformer blocks.
        hidden_size: width of the hidden states.
        device, dtype: where logits live and what they are computed in.
        name: for messages.
        final_soft_cap: logits are ``cap * tanh(x / cap)`` of products with the output matrix where it is set.
    """

    name: str
    vocab_size: int
    context_length: int
    num_layers: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    final_soft_cap: float | None = None

    @abstractmethod
    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""

    @abstractmethod
    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        """Evaluate all segments' rows in one pass and write their entries to the scratch slots.

        Args:
            segments: one per sequence; caches must differ.
            hidden: hidden states to return: ``"final"`` (after the final norm) or the index of a block (its input).
            skip: sublayers left out (self-speculation). Entries of skipped attention are left undefined, those of the
                others are not what the whole model would write: such rows must be rolled back, never committed.

        Returns:
            One output per segment, in order.
        """

    @property
    def supports_skip(self) -> bool:
        """Whether ``skip`` is honoured."""
        return False

    @property
    def weight_format(self) -> str:
        """Which kernels few rows go through: int4, int8 or full. Answers and hidden states depend on it a little."""
        return "full"

    @property
    def cheap_rows(self) -> int:
        """Rows of a pass that cost little more than one: what default trees are made for."""
        return 8

    # -- what draft heads build on ---------------------------------------------------------------------------

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids int64 [...] -> what block 0 receives, [..., hidden_size] in ``dtype``."""

    @abstractmethod
    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        """Rows of the output matrix, [len(tokens), hidden_size] in ``dtype``; all [vocab_size, hidden_size] by default.

        Products of the final hidden state with them are logits, before a soft cap where the model has one.
        """


def extend_cache(
    model: LanguageModel, cache: SequenceCache, tokens: Sequence[int], wants_logits: bool = False
) -> Tensor:
    """Evaluate committed text behind ``cache`` chunk by chunk and keep its entries.

    Returns:
        Logits [1, vocabulary] of the last token if they are wanted and there is one, else [0, vocabulary].
    """
    rows = torch.empty((0, model.vocab_size), device=model.device)
    for start in range(0, len(tokens), PREFILL_ROWS):
        chunk = tokens[start : start + PREFILL_ROWS]
        is_last = start + len(chunk) == len(tokens)
        wanted = [len(chunk) - 1] if wants_logits and is_last else []
        rows = model.forward([Segment(cache, chunk, logit_rows=wanted)])[0].logits
        cache.commit(range(len(chunk)))
    return rows


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix: what a cache of one text can keep for the other."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def blocks_after(layer: int, num_layers: int) -> Sublayers:
    """What an early exit after ``layer`` blocks skips: every sublayer of the later ones."""
    return frozenset(range(2 * layer, 2 * num_layers))


def tree_segment(cache: SequenceCache, tree: TokenTree, logit_rows: Sequence[int] | None = None) -> Segment:
    """The segment that evaluates a whole token tree behind the committed prefix (no scratch entries may exist)."""
    parents = tree.parent_array()
    if is_chain(parents):
        return Segment(cache, tree.tokens, logit_rows=logit_rows)
    positions = [cache.length + depth for depth in tree.depths]
    return Segment(cache, tree.tokens, positions, ancestors_mask(parents), logit_rows)
