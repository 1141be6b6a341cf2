"""The target's distributions at a tree's nodes, made from one forward's logits only where the verifier looks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.sampling.transform import LogitsPipeline
from outrider.trees.token_tree import TokenTree


class TargetRows:
    """``TargetDistributions`` over logits [nodes, vocabulary] of one tree (row i belongs to node i)."""

    def __init__(self, logits: Tensor, pipeline: LogitsPipeline, tree: TokenTree, output: Sequence[int]) -> None:
        self.logits = logits
        self.pipeline = pipeline
        self.tree = tree
        self.output = output
        self._probabilities: dict[int, Tensor] = {}

    def probabilities(self, node: int) -> Tensor:
        if node not in self._probabilities:
            self._probabilities[node] = self.pipeline.probabilities(self.logits[node], self._above(node))
        return self._probabilities[node]

    def greedy_token(self, node: int) -> int:
        return self.pipeline.greedy_token(self.logits[node], self._above(node))

    def _above(self, node: int) -> Sequence[int]:
        if not self.pipeline.uses_history:
            return ()
        return [*self.output, *self.tree.path_tokens(node)]
