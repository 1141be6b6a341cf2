"""EdgeLLM's branch pacer (Xu et al. 2023, arXiv:2309.04255, "LLMCad"), as we understand it: the best branch goes on.

On a weak device a draft pass over n branches costs n times one, so branches are decoded one node at a time: always the
branch with the highest confidence C, the product of its draft probabilities. A branch begins at a node's runner-up
token. All nodes stay in one buffer: switching branches changes a mask and moves no cache entry
(``drafters/model_source.py``). When the best branch's C falls below the fallback threshold, the target checks the tree.
Knows nothing of models.
"""

from __future__ import annotations

import heapq
from typing import Annotated, ClassVar

from pydantic import Field

from outrider.trees.shapes.base import ChildSource, GrowLimits, Shape, ShapeOptions
from outrider.trees.shapes.fallback import HIGHEST, INITIAL, FallbackThreshold
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology


class PacerOptions(ShapeOptions):
    """Options of ``Pacer``."""

    nodes: Annotated[int, Field(ge=1, le=4096, description="guesses at most, each of one draft call")] = 16
    branches: Annotated[int, Field(ge=1, le=64, description="a node's best tokens that may begin branches")] = 3
    fallback: Annotated[
        float, Field(ge=0.0, le=HIGHEST, description="stop where the best branch's confidence is below; 0 never stops")
    ] = INITIAL
    adaptive: Annotated[bool, Field(description="let the threshold follow how many guesses are accepted")] = True


class Pacer(Shape):
    """A tree grown one node per draft call, along its most confident branch."""

    Options: ClassVar[type[ShapeOptions]] = PacerOptions
    topology = Topology.TREE
    kinds = frozenset({ProposalKind.DETERMINISTIC})
    positional = "nodes"
    summary = "one node at a time on the most confident branch, until confidence falls below a self-adaptive threshold"
    source = "EdgeLLM (LLMCad), Xu et al. 2023, arXiv:2309.04255"

    def __init__(self, options: PacerOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        super().__init__(options, proposal)
        self._settings = options
        self._threshold = FallbackThreshold(options.fallback)
        self._depth = 0  # of the last tree

    @property
    def size(self) -> int:
        return self._settings.nodes

    @property
    def alpha(self) -> float:
        """Confidence below which no branch is decoded."""
        return self._threshold.alpha if self._settings.fallback > 0.0 else 0.0

    def for_request(self) -> Pacer:
        return Pacer(self._settings, self.proposal)

    def observe(self, drafted: int, accepted: int) -> None:
        """The rule's N_all is the tree's depth: of several guesses for one position at most one can be right."""
        if self._settings.adaptive:
            self._threshold.update(min(drafted, self._depth), accepted)

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        tree = TokenTree(root_token, self.proposal)
        room = min(self._settings.nodes, limits.max_nodes)
        branches = _Branches(self._settings.branches)
        if room > 0 and limits.max_depth > 0:
            branches.open_below(0, 1.0, tree, source)
        # The first guess costs no further draft call, and the threshold goes on learning: it is always made.
        while tree.drafted < room and branches and (branches.confidence >= self.alpha or not tree.drafted):
            confidence, parent, token = branches.pop()
            node = tree.add(parent, token, source.name)
            if tree.depths[node] < limits.max_depth and tree.drafted < room:
                branches.open_below(node, confidence, tree, source)
        self._depth = max(tree.depths)
        return tree


class _Branches:
    """Tips that may be decoded next, the most confident first; of equals the one found first."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._heap: list[tuple[float, int, int, int]] = []  # -C, order of discovery, parent, token
        self._found = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def confidence(self) -> float:
        """The highest C."""
        return -self._heap[0][0]

    def pop(self) -> tuple[float, int, int]:
        """C, parent and token of the most confident tip."""
        negative, _, parent, token = heapq.heappop(self._heap)
        return -negative, parent, token

    def open_below(self, node: int, confidence: float, tree: TokenTree, source: ChildSource) -> None:
        """One draft call: ``node``'s best tokens are new tips, of confidence C(node) times their scores."""
        (candidates,) = source.candidates(tree, (node,))
        for token, score in zip(*candidates.top(self._per_node), strict=True):
            heapq.heappush(self._heap, (-confidence * score, self._found, node, token))
            self._found += 1
