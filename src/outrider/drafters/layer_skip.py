"""Draft with the target's own first blocks and its head; the draft shares the target's cache entries.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), without its training: an untrained exit agrees with the full model
less often. The prefix entries of the first blocks are the target's own, so drafting needs no cache and no prefill; the
guesses' entries are scratch and rolled back before the target's pass writes them in full.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outrider.drafters.base import DraftBudget, DraftContext, Drafter, DraftOptions, DraftSession, Observation, Proposal
from outrider.drafters.model_source import ModelSource
from outrider.errors import InvalidOptionError
from outrider.models.base import LanguageModel
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
    summary = "the target's own first layers and head"
    source = "LayerSkip (Elhoushi et al. 2024)"

    def __init__(
        self, options: DraftOptions, shape: Shape, target: LanguageModel, draft_model: LanguageModel | None = None
    ) -> None:
        super().__init__(options, shape, target, draft_model)
        if not isinstance(options, LayerSkipOptions):
            raise TypeError(f"layer_skip takes LayerSkipOptions, got {type(options).__name__}")
        if not target.supports_exit:
            raise InvalidOptionError(
                f"layer_skip cannot draft with {target.name}: this model cannot stop after a chosen layer; "
                "use --drafter ngram or small_model"
            )
        self.layers = options.layers or max(1, target.num_layers * 2 // 3)
        if self.layers >= target.num_layers:
            raise InvalidOptionError(
                f"layer_skip layers={self.layers} must be below the target's {target.num_layers} layers"
            )

    def new_session(self) -> LayerSkipSession:
        return LayerSkipSession(self)


class LayerSkipSession(DraftSession):
    """Only the text is kept between steps; all entries live in the target's cache."""

    def __init__(self, drafter: LayerSkip) -> None:
        self.drafter = drafter

    def begin(self, context: DraftContext) -> None:
        self._context = context
        self.tokens = list(context.prompt)

    def propose(self, budget: DraftBudget) -> Proposal:
        context = self._context
        if budget.max_depth < 1 or budget.max_nodes < 1:
            return Proposal(TokenTree(self.tokens[-1]))
        output = self.tokens[len(context.prompt) :]
        limits = GrowLimits(budget.max_nodes, budget.max_depth, len(output), context.random)
        with context.target_cache.speculation():
            source = ModelSource(
                "layer_skip",
                context.target,
                context.target_cache,
                context.pipeline,
                output,
                exit_layer=self.drafter.layers,
            )
            return Proposal(self.drafter.shape.grow(self.tokens[-1], source, limits))

    def observe(self, observation: Observation) -> None:
        self.tokens.extend(observation.committed)
