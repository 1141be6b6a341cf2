"""What drafters with one head a depth share (Medusa, Hydra): the session, and candidates in the target's tokens.

The heads read the target's final hidden state at the row that predicted the last committed token, and nothing older.
So a session's whole state is that one row, and the target may keep any entries of an earlier text. A tree is at most as
deep as there are heads. Knows no shape and no verifier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession, Observation
from outrider.drafters.feature_source import DraftVocabulary
from outrider.drafters.head_options import HeadOptions, compute_dtype, open_head
from outrider.drafters.model_source import RowSource
from outrider.heads.cached import pack
from outrider.heads.per_depth import PerDepthNetwork
from outrider.models.base import FINAL_HIDDEN
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import FloatArray, GrowLimits, RankedChildren, Shape
from outrider.trees.token_tree import TokenTree

Network = PerDepthNetwork[Any]


class PerDepthDrafter(Drafter):
    """Base; subclasses say which method and where candidates come from."""

    Options: ClassVar[type[DraftOptions]] = HeadOptions
    positional: ClassVar[str | None] = "head"
    samples = True
    hidden = (FINAL_HIDDEN,)
    method: ClassVar[str]

    def __init__(self, options: HeadOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.target = parts.target
        self.dtype = compute_dtype(parts.target)
        self.network = parts.once((self.method, options), lambda: self._open(options))

    def _open(self, options: HeadOptions) -> Network:
        network = open_head(self.method, options.head, self.parts)
        if not isinstance(network, PerDepthNetwork):
            raise TypeError(f"{self.method} has no head for each depth")
        pack(network, self.dtype, self.target.device, options.wants_int4(self.target))
        return network

    def new_session(self) -> PerDepthSession:
        return PerDepthSession(self, self.shape)

    @abstractmethod
    def open_source(self, feature: Tensor, heads: int, pipeline: LogitsPipeline, output: Sequence[int]) -> RowSource:
        """Where one tree's candidates come from.

        Args:
            feature: [1, H] in ``dtype``, of the row that predicted the root.
            heads: the tree's depth at most.
            pipeline, output: as ``RowSource``.
        """


class PerDepthSession(GrowingSession):
    """``feature`` [1, H] belongs to the last committed token; before anything was observed there are no guesses."""

    def __init__(self, drafter: PerDepthDrafter, shape: Shape) -> None:
        super().__init__(shape)
        self.drafter = drafter
        self.feature: Tensor | None = None

    def begin(self, context: DraftContext) -> None:
        super().begin(context)
        self.feature = None

    def observe(self, observation: Observation) -> None:
        states = observation.hidden.get(FINAL_HIDDEN)
        # A copy: a view would keep the states of a whole prompt.
        self.feature = None if states is None or not len(states) else states[-1:].to(self.drafter.dtype, copy=True)
        super().observe(observation)

    @torch.inference_mode()
    def grow(self, limits: GrowLimits) -> TokenTree:
        if self.feature is None:
            return TokenTree(self.tokens[-1])
        depth = min(limits.max_depth, self.drafter.network.config.steps)
        source = self.drafter.open_source(self.feature, depth, self.context.pipeline, self.output)
        return self.shape.grow(self.tokens[-1], source, replace(limits, max_depth=depth))

    def end(self) -> None:
        super().end()
        self.feature = None


class PerDepthSource(RowSource):
    """A ``ChildSource`` whose rows are logits over the draft vocabulary; node after node, no cache."""

    def __init__(self, name: str, network: Network, pipeline: LogitsPipeline, output: Sequence[int]) -> None:
        super().__init__(name, pipeline, output, None, 0)
        self.network = network
        self._vocabulary = DraftVocabulary(network.draft_ids, pipeline.vocab_size)

    def over_target_vocabulary(self, rows: Tensor) -> Tensor:
        return self._vocabulary.spread(rows)

    def rank(self, rows: Tensor, k: int, least: FloatArray | None) -> RankedChildren:
        return self._vocabulary.named(super().rank(self._vocabulary.cut(rows), k, least))
