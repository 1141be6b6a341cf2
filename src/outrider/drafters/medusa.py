"""Draft with Medusa heads (Cai et al. 2024, arXiv 2401.10774): all depths guessed at once from one hidden state.

Head d's distribution is that of every node of depth d, whatever its path: the heads do not see each other's guesses.
Sampled children of a node are drawn from it independently of other nodes, and it is the q that verifiers get, so every
exact rule stays exact. The paper's acceptance rule is ``--verifier typical --lossy``. The network is
``heads/medusa.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.model_source import RowSource
from outrider.drafters.per_depth import PerDepthDrafter, PerDepthSource
from outrider.heads.medusa import Medusa
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import Candidates, FloatArray, RankedChildren
from outrider.trees.token_tree import TokenTree


class MedusaDrafter(PerDepthDrafter):
    """Medusa heads, any shape."""

    method = "medusa"
    default_shape = "static:small_16"
    summary = "independent trained heads, one a depth, on the target's last hidden state"
    source = "Medusa, Cai et al. 2024, arXiv:2401.10774"

    def open_source(self, feature: Tensor, heads: int, pipeline: LogitsPipeline, output: Sequence[int]) -> RowSource:
        network = self.network
        if not isinstance(network, Medusa):
            raise TypeError(f"not a Medusa network: {type(network).__name__}")
        return MedusaSource(self.method, network, feature, heads, pipeline, output)


class MedusaSource(PerDepthSource):
    """All heads are evaluated once, when the tree begins; nodes of equal depth share a row, and what is made of it.

    Args:
        feature: [1, H], of the row that predicted the root.
        heads: depths that the tree may have.
    """

    def __init__(
        self,
        name: str,
        network: Medusa,
        feature: Tensor,
        heads: int,
        pipeline: LogitsPipeline,
        output: Sequence[int],
    ) -> None:
        super().__init__(name, network, pipeline, output)
        self._by_depth = network.all_logits(feature, heads)[:, 0]  # [heads, Vd]
        self._candidates: dict[int, Candidates] = {}

    def forward_rows(
        self, tree: TokenTree, nodes: Sequence[int], positions: list[int], mask: NDArray[np.bool_]
    ) -> Tensor:
        return self._by_depth[[tree.depths[node] for node in nodes]]

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        if self.pipeline.uses_history:
            return super().candidates(tree, nodes)
        for node in nodes:
            if tree.depths[node] not in self._candidates:
                (self._candidates[tree.depths[node]],) = super().candidates(tree, [node])
        return [self._candidates[tree.depths[node]] for node in nodes]

    def ranked(self, tree: TokenTree, nodes: Sequence[int], k: int, least: FloatArray | None = None) -> RankedChildren:
        if self.pipeline.uses_history:
            return super().ranked(tree, nodes, k, least)
        depths = np.array([tree.depths[node] for node in nodes], dtype=np.int64)
        _, first, group = np.unique(depths, return_index=True, return_inverse=True)
        lowest = None if least is None else np.array([least[group == index].min() for index in range(len(first))])
        known = super().ranked(tree, [nodes[index] for index in first], k, lowest)
        return _for_each(known, group)


def _for_each(known: RankedChildren, group: NDArray[np.int64]) -> RankedChildren:
    """Children of groups of nodes -> children of every node, ``group`` [nodes] saying which is its."""
    starts = np.searchsorted(known.owners, np.arange(int(group.max()) + 2))
    begins, counts = starts[group], np.diff(starts)[group]
    owners = np.repeat(np.arange(len(group), dtype=np.int64), counts)
    place = begins[owners] + np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    return RankedChildren(owners, known.tokens[place], known.scores[place])
