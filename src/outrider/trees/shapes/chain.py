"""A chain of guesses with an optional confidence stop (Leviathan et al. 2023, algorithm 1; the stop is the rule of
transformers' assistant and of EdgeLLM's first threshold).

Knows nothing of where the candidates come from. The stop is a function of q alone and is taken before drawing, so that
no drawn token is ever dropped.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outrider.trees.shapes.base import ChildSource, GrowLimits, Shape, ShapeOptions, add_children
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology


class ChainOptions(ShapeOptions):
    """Options of ``Chain``."""

    length: Annotated[int, Field(ge=1, le=4096, description="guesses at most")] = 8
    stop: Annotated[float, Field(ge=0.0, le=1.0, description="stop where the best candidate scores below this")] = 0.0


class Chain(Shape):
    """One child per level. Drawing one token with or without replacement is the same thing."""

    Options: ClassVar[type[ShapeOptions]] = ChainOptions
    topology = Topology.CHAIN
    kinds = frozenset({ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT})
    positional = "length"
    summary = "one guess after another, with an optional stop where the drafter is unsure"
    source = "Leviathan et al. 2023, arXiv:2211.17192"

    def __init__(self, options: ChainOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        super().__init__(options, proposal)
        self._length = options.length
        self._stop = options.stop

    @property
    def size(self) -> int:
        return self._length

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        tree = TokenTree(root_token, self.proposal)
        node = 0
        for _ in range(min(self._length, limits.max_depth, limits.max_nodes)):
            (candidates,) = source.candidates(tree, (node,))
            if self._stop > 0.0 and candidates.confidence < self._stop:
                break
            added = add_children(tree, node, candidates, 1, source.name, limits)
            if not added:
                break
            node = added[0]
        return tree
