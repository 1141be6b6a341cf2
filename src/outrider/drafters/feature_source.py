"""Candidates from a recurrent head: each node's row reads its token and the head's output at its parent.

The draft vocabulary is translated here: shapes and verifiers see target tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.model_source import RowSource
from outrider.heads.cached import CachedHead, HeadCache
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import FloatArray, RankedChildren
from outrider.trees.token_tree import TokenTree

Embed = Callable[[Tensor], Tensor]


class DraftVocabulary:
    """Logits over draft tokens -> logits or children over the target's tokens.

    Args:
        ids: int64 [draft vocabulary], ascending; ``None`` when the two are the same.
        vocab_size: tokens that the request may use; what lies beyond is never guessed.
    """

    def __init__(self, ids: Tensor | None, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._ids = None if ids is None else ids[ids < vocab_size]
        self._numbers = None if self._ids is None else self._ids.numpy()

    def spread(self, rows: Tensor) -> Tensor:
        """[n, draft vocabulary] -> [n, vocab_size], -inf for tokens that cannot be guessed."""
        if self._ids is None:
            return rows[:, : self.vocab_size]
        full = rows.new_full((rows.shape[0], self.vocab_size), -torch.inf)
        full[:, self._ids.to(rows.device)] = rows[:, : len(self._ids)]
        return full

    def cut(self, rows: Tensor) -> Tensor:
        """Without draft tokens that the request may not use."""
        return rows[:, : self.vocab_size if self._ids is None else len(self._ids)]

    def named(self, ranked: RankedChildren) -> RankedChildren:
        """The same children with the target's token ids."""
        if self._numbers is None:
            return ranked
        return RankedChildren(ranked.owners, self._numbers[ranked.tokens], ranked.scores)


class FeatureSource(RowSource):
    """A ``ChildSource`` for one proposal of a recurrent head.

    Args:
        name, pipeline, output: as ``RowSource``.
        head, cache: the head and the committed pairs; the caller rolls back.
        embed: the target's token embedding.
        vocabulary: the head's tokens among those that the request may use.
        root_output: the head's output [1, H] at the root.
        root_position: row of the root's pair: the root token's index less 1.
    """

    def __init__(
        self,
        name: str,
        head: CachedHead,
        cache: HeadCache,
        embed: Embed,
        vocabulary: DraftVocabulary,
        pipeline: LogitsPipeline,
        output: Sequence[int],
        root_output: Tensor,
        root_position: int,
    ) -> None:
        super().__init__(name, pipeline, output, head.network.logits(root_output), root_position)
        self.head = head
        self.cache = cache
        self._embed = embed
        self._vocabulary = vocabulary
        self._states = head.network.recur(root_output)  # of the root, then of every scratch slot

    def forward_rows(
        self, tree: TokenTree, nodes: Sequence[int], positions: list[int], mask: NDArray[np.bool_]
    ) -> Tensor:
        above = torch.tensor([self.slots.get(tree.parents[node], -1) + 1 for node in nodes])
        token = self._embed(torch.tensor([tree.tokens[node] for node in nodes])).to(self.head.dtype)
        states = self._states[above.to(self._states.device)]
        output = self.head.forward(self.cache, token, states, positions, mask)
        self._states = torch.cat([self._states, self.head.network.recur(output)])
        return self.head.network.logits(output)

    def over_target_vocabulary(self, rows: Tensor) -> Tensor:
        return self._vocabulary.spread(rows)

    def rank(self, rows: Tensor, k: int, least: FloatArray | None) -> RankedChildren:
        return self._vocabulary.named(super().rank(self._vocabulary.cut(rows), k, least))
