"""Candidates from a network: grows scratch entries in a cache as a shape expands the tree, level by level.

``RowSource`` keeps the tree mask and turns rows of logits into candidates; ``ModelSource`` gets its rows from a
language model (``small_model``, ``layer_skip``), ``feature_source.py`` from a draft head. Knows no shape and no
verifier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.ranking import best_children
from outrider.models.base import FULL, LanguageModel, Segment, SequenceCache, Sublayers
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import BatchSource, Candidates, FloatArray, RankedChildren, rank_candidates
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind

_FIRST_SLOTS = 64


class RowSource(BatchSource):
    """A ``ChildSource`` for one proposal.

    Args:
        name: recorded as the source of every node.
        pipeline: the request's logits pipeline.
        output: output tokens committed so far, root included.
        root_rows: logits [1, vocabulary] of the root when it was evaluated already, else ``None``: the root is then
            the first scratch row.
        root_position: position of the root's row.
    """

    def __init__(
        self,
        name: str,
        pipeline: LogitsPipeline,
        output: Sequence[int],
        root_rows: Tensor | None,
        root_position: int,
    ) -> None:
        self.name = name
        self.pipeline = pipeline
        self.output = list(output)
        self.slots: dict[int, int] = {}  # node -> its scratch slot
        self._root_rows = root_rows
        self._visible: NDArray[np.bool_] = np.zeros((0, 0), dtype=np.bool_)  # ancestors of each forwarded slot
        self._buffer = self._visible
        self._root_position = root_position

    @abstractmethod
    def forward_rows(
        self, tree: TokenTree, nodes: Sequence[int], positions: list[int], mask: NDArray[np.bool_]
    ) -> Tensor:
        """Logits [len(nodes), vocabulary] of new scratch rows; ``mask`` [len(nodes), all scratch rows] is theirs."""

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        """One draft forward for all ``nodes``; their distributions after the request's processing."""
        rows = self.over_target_vocabulary(self.rows(tree, nodes))
        process = self.pipeline.ranking if tree.kind is ProposalKind.DETERMINISTIC else self._drawable
        return [
            Candidates(probabilities=process(row, self.above(tree, node)))
            for row, node in zip(rows, nodes, strict=True)
        ]

    def _drawable(self, row: Tensor, output: Sequence[int]) -> Tensor:
        """What children are drawn from: the request's distribution of ``row``.

        All tokens alike where the request leaves none that the drafter knows (``min_tokens`` and a small draft
        vocabulary of end tokens): bad guesses, but drawn from the q that they carry.
        """
        q = self.pipeline.probabilities(row, output)
        return torch.full_like(q, 1.0 / len(q)) if bool(q[0].isnan()) else q

    def ranked(self, tree: TokenTree, nodes: Sequence[int], k: int, least: FloatArray | None = None) -> RankedChildren:
        """One draft forward for all ``nodes`` and the ``k`` best children of each (``drafters/ranking.py``).

        Scores are float32 probabilities. Where penalties or biases act, every node's logits are processed by
        themselves, as in ``candidates``.
        """
        if self.pipeline.changes_logits or tree.kind is not ProposalKind.DETERMINISTIC:
            return rank_candidates(self.candidates(tree, nodes), k)
        return self.rank(self.rows(tree, nodes), k, least)

    def over_target_vocabulary(self, rows: Tensor) -> Tensor:
        """Logits [n, draft vocabulary] -> logits over the target's tokens, -inf for those that cannot be guessed."""
        missing = self.pipeline.vocab_size - rows.shape[-1]
        # A draft model may have fewer padding rows than the target's tokenizer has tokens.
        return F.pad(rows, (0, missing), value=float("-inf")) if missing > 0 else rows

    def rank(self, rows: Tensor, k: int, least: FloatArray | None) -> RankedChildren:
        """The ``k`` best target tokens of each row of logits."""
        return best_children(rows[:, : self.pipeline.vocab_size], self.pipeline.params, k, least)

    def renumber(self, new_index: Mapping[int, int]) -> None:
        """Nodes have other indices in the tree that the shape returns; those that are not in it lose their slots."""
        self.slots = {new_index[node]: slot for node, slot in self.slots.items() if node in new_index}

    def rows(self, tree: TokenTree, nodes: Sequence[int]) -> Tensor:
        """Logits [len(nodes), draft vocabulary]."""
        rows = self._root_rows if list(nodes) == [0] else None
        return self.evaluate(tree, nodes) if rows is None else rows

    def above(self, tree: TokenTree, node: int) -> Sequence[int]:
        """The output tokens that the pipeline needs at ``node``: none when no parameter looks at them."""
        return [*self.output, *tree.path_tokens(node)] if self.pipeline.uses_history else ()

    def evaluate(self, tree: TokenTree, nodes: Sequence[int]) -> Tensor:
        """Logits [len(nodes), vocabulary] of nodes whose ancestors were evaluated before or are in the cache."""
        before, count = self._visible.shape[0], len(nodes)
        visible = self._grow_mask(before + count)
        parent_slots = np.array([self.slots.get(tree.parents[node], -1) for node in nodes])
        has_slot = parent_slots >= 0
        new = np.arange(before, before + count)
        visible[new[has_slot], :before] = visible[parent_slots[has_slot], :before]
        visible[new, new] = True
        self.slots.update(zip(nodes, new.tolist(), strict=True))
        positions = [self._root_position + tree.depths[node] for node in nodes]
        return self.forward_rows(tree, nodes, positions, visible[before:])

    def _grow_mask(self, size: int) -> NDArray[np.bool_]:
        """``_visible`` with room for ``size`` slots. Its buffer doubles, so a tree grown node by node copies little."""
        before = self._visible.shape[0]
        if self._visible.base is not self._buffer or size > len(self._buffer):
            self._buffer = np.zeros((max(2 * before, size, _FIRST_SLOTS),) * 2, dtype=np.bool_)
            self._buffer[:before, :before] = self._visible
        self._visible = self._buffer[:size, :size]
        return self._visible


class ModelSource(RowSource):
    """Rows from a language model.

    Args:
        model, cache: who guesses, and where its entries go; the caller rolls back or commits.
        skip: sublayers of the model that drafting leaves out.
        name, pipeline, output, root_rows: as ``RowSource``.
    """

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        cache: SequenceCache,
        pipeline: LogitsPipeline,
        output: Sequence[int],
        root_rows: Tensor | None = None,
        skip: Sublayers = FULL,
    ) -> None:
        super().__init__(name, pipeline, output, root_rows, cache.length - (0 if root_rows is None else 1))
        self.model = model
        self.cache = cache
        self._skip = skip

    def forward_rows(
        self, tree: TokenTree, nodes: Sequence[int], positions: list[int], mask: NDArray[np.bool_]
    ) -> Tensor:
        segment = Segment(self.cache, [tree.tokens[node] for node in nodes], positions, mask)
        return self.model.forward([segment], skip=self._skip)[0].logits
