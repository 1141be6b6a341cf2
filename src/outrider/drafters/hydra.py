"""Draft with Hydra heads (Ankner et al. 2024, arXiv 2402.05109): each depth's head reads the guesses above it.

A level of the tree costs one evaluation of one head for all nodes expanded there. The network is ``heads/hydra.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.drafters.feature_source import Embed
from outrider.drafters.model_source import RowSource
from outrider.drafters.per_depth import Network, PerDepthDrafter, PerDepthSource
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.token_tree import TokenTree


class HydraDrafter(PerDepthDrafter):
    """Hydra heads, any shape."""

    method = "hydra"
    default_shape = "best_first:16"
    summary = "trained heads, one a depth, that read the target's last hidden state and the guesses so far"
    source = "Hydra, Ankner et al. 2024, arXiv:2402.05109"

    def open_source(self, feature: Tensor, heads: int, pipeline: LogitsPipeline, output: Sequence[int]) -> RowSource:
        return HydraSource(self.method, self.network, feature, self.target.embed, pipeline, output)


class HydraSource(PerDepthSource):
    """Head d for the nodes of depth d.

    Args:
        feature: [1, H], of the row that predicted the root.
        embed: the target's token embedding.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        feature: Tensor,
        embed: Embed,
        pipeline: LogitsPipeline,
        output: Sequence[int],
    ) -> None:
        super().__init__(name, network, pipeline, output)
        self._feature = feature
        self._embed = embed

    def forward_rows(
        self, tree: TokenTree, nodes: Sequence[int], positions: list[int], mask: NDArray[np.bool_]
    ) -> Tensor:
        # Best-first growth expands nodes of several depths together.
        by_depth: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            by_depth.setdefault(tree.depths[node], []).append(place)
        if len(by_depth) == 1:
            return self._level(tree, nodes)
        order = [place for places in by_depth.values() for place in places]
        rows = torch.cat([self._level(tree, [nodes[place] for place in places]) for places in by_depth.values()])
        return rows[torch.tensor(order).argsort()]

    def _level(self, tree: TokenTree, nodes: Sequence[int]) -> Tensor:
        """Logits of nodes of one depth."""
        depth = tree.depths[nodes[0]]
        paths = torch.tensor([[tree.tokens[0], *tree.path_tokens(node)] for node in nodes])
        tokens = self._embed(paths).to(self._feature.dtype)
        feature = self._feature.expand(len(nodes), -1)
        state = self.network.state(depth, feature=feature, tokens=tokens.unbind(dim=1))
        return self.network.logits(depth, state)
