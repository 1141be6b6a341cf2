"""Draft with the target's own first blocks and its head; the draft shares the target's cache entries.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), without its training: an untrained exit agrees with the full model
less often. The prefix entries of the first blocks are the target's own, so drafting needs no cache and no prefill; the
guesses' entries are scratch and rolled back before the target's pass writes them in full.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outrider.drafters.base import Drafter, DraftOptions, DraftParts, GrowingSession
from outrider.drafters.model_source import ModelSource
from outrider.errors import InvalidOptionError
from outrider.models.base import blocks_after
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree


class LayerSkipOptions(DraftOptions):
    """``layers``: blocks that draft (0 picks two thirds of the target's)."""

    layers: Annotated[int, Field(ge=0)] = 0


class LayerSkip(Drafter):
    """The target's first blocks as the draft model."""

    Options: ClassVar[type[DraftOptions]] = LayerSkipOptions
    positional: ClassVar[str | None] = "layers"
    samples = True
    default_shape = "chain:3"
    summary = "the target's own first layers and head"
    source = "LayerSkip (Elhoushi et al. 2024)"

    def __init__(self, options: LayerSkipOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        target = parts.target
        if not target.supports_skip:
            raise InvalidOptionError(
                f"layer_skip cannot draft with {target.name}: this model cannot leave layers out; "
                "use --drafter ngram or small_model"
            )
        self.layers = options.layers or max(1, target.num_layers * 2 // 3)
        if self.layers >= target.num_layers:
            raise InvalidOptionError(
                f"layer_skip layers={self.layers} must be below the target's {target.num_layers} layers"
            )

    def new_session(self) -> LayerSkipSession:
        return LayerSkipSession(self)


class LayerSkipSession(GrowingSession):
    """Only the text is kept between steps; all entries live in the target's cache."""

    def __init__(self, drafter: LayerSkip) -> None:
        super().__init__(drafter.shape)
        self.skip = blocks_after(drafter.layers, drafter.parts.target.num_layers)

    def grow(self, limits: GrowLimits) -> TokenTree:
        context = self.context
        with context.target_cache.speculation():
            source = ModelSource(
                "layer_skip", context.target, context.target_cache, context.pipeline, self.output, skip=self.skip
            )
            return self.shape.grow(self.tokens[-1], source, limits)
