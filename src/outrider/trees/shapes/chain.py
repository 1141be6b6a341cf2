"""A chain of guesses with optional confidence stops (Leviathan et al. 2023, algorithm 1).

``stop`` looks at one distribution, as transformers' assisted generation does; ``fallback`` at the whole chain's
confidence, with EdgeLLM's self-adaptive threshold (``fallback.py``). Knows nothing of where the candidates come from.
Both stops are functions of q and of tokens drawn before, taken before drawing: no drawn token is ever dropped.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outrider.trees.shapes.base import (
    BatchSource,
    Candidates,
    ChildSource,
    GrowLimits,
    Shape,
    ShapeOptions,
    add_children,
)
from outrider.trees.shapes.fallback import HIGHEST, FallbackThreshold
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology


class ChainOptions(ShapeOptions):
    """Options of ``Chain``."""

    length: Annotated[int, Field(ge=1, le=4096, description="guesses at most")] = 8
    stop: Annotated[float, Field(ge=0.0, le=1.0, description="stop where the best candidate scores below this")] = 0.0
    fallback: Annotated[
        float,
        Field(
            ge=0.0,
            le=HIGHEST,
            description="stop where the product of the scores falls below a threshold that starts here and adapts",
        ),
    ] = 0.0


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
        self._settings = options
        self._threshold = FallbackThreshold(options.fallback) if options.fallback > 0.0 else None

    @property
    def size(self) -> int:
        return self._settings.length

    @property
    def most_children(self) -> int:
        return 1

    def for_request(self) -> Chain:
        return self if self._threshold is None else Chain(self._settings, self.proposal)

    def observe(self, drafted: int, accepted: int) -> None:
        if self._threshold is not None:
            self._threshold.update(drafted, accepted)

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        tree = TokenTree(root_token, self.proposal)
        alpha = 0.0 if self._threshold is None else self._threshold.alpha
        node, confidence = 0, 1.0
        for _ in range(min(self._settings.length, limits.max_depth, limits.max_nodes)):
            if confidence < alpha:  # spares the draft call whose outcome is known
                break
            candidates = self._candidates(source, tree, node)
            if self._is_unsure(candidates, confidence, alpha, is_first=node == 0):
                break
            added = add_children(tree, node, candidates, 1, source.name, limits)
            if not added:
                break
            node = added[0]
            if alpha > 0.0:
                confidence *= candidates.score_of(tree.tokens[node])
        return tree

    def _is_unsure(self, candidates: Candidates, confidence: float, alpha: float, is_first: bool) -> bool:
        """Whether no further guess is to be made; decided from q and from tokens drawn before.

        The fallback spares the first guess: it costs no further draft call, and the threshold goes on learning.
        """
        best = candidates.confidence if self._settings.stop > 0.0 or alpha > 0.0 else 1.0
        return best < self._settings.stop or (not is_first and confidence * best < alpha)

    def _candidates(self, source: ChildSource, tree: TokenTree, node: int) -> Candidates:
        """What may follow ``node``: the best guess alone where no score is looked at, which a model finds faster."""
        is_plain = tree.kind is ProposalKind.DETERMINISTIC and self._settings.stop == 0.0 and self._threshold is None
        if is_plain and isinstance(source, BatchSource):
            best = source.ranked(tree, (node,), 1)
            return Candidates(best.tokens.tolist(), best.scores.tolist())
        (candidates,) = source.candidates(tree, (node,))
        return candidates
