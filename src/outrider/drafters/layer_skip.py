"""Draft with the target itself, some of its sublayers left out; the draft shares the target's cache entries.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), without its training: leave after the first blocks. SWIFT (Xia et
al. 2024, arXiv 2410.06916): leave out a subset of attention and MLP sublayers that a search chose for this model. With
a trained head (``heads/exit.py``): leave after the first blocks, and let the head read the state. The committed entries
are the target's own, so drafting needs no cache and no prefill; the guesses' entries are scratch and rolled back before
the target's pass writes them in full. Does not know where subsets are kept or how they are found.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from outrider.drafters.base import Drafter, DraftOptions, DraftParts, GrowingSession
from outrider.drafters.exit_source import ExitSource, open_exit
from outrider.drafters.layer_subsets import find_subset, parse_skip
from outrider.drafters.model_source import ModelSource, RowSource
from outrider.errors import InvalidOptionError
from outrider.heads.exit import EarlyExit
from outrider.models.base import LanguageModel, Sublayers, blocks_after
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

AUTO, SEARCHED, NONE = "auto", "searched", "none"


class LayerSkipOptions(DraftOptions):
    """Options of ``LayerSkip``."""

    layers: Annotated[int, Field(ge=0, description="draft with the first blocks only; 0: as ``skip`` says")] = 0
    skip: Annotated[str, Field(description="auto, searched, or the sublayers to leave out, as in 12a.13m.14-16")] = AUTO
    head: Annotated[
        str,
        Field(description="a trained exit: head file, auto (the one that ships for the target) or random; or none"),
    ] = NONE


class LayerSkip(Drafter):
    """The target without some of its sublayers as the draft model."""

    Options: ClassVar[type[DraftOptions]] = LayerSkipOptions
    positional: ClassVar[str | None] = "layers"
    samples = True
    default_shape = "chain:3"
    summary = "the target itself without some of its layers"
    source = "LayerSkip (Elhoushi et al. 2024); SWIFT (Xia et al. 2024)"

    def __init__(self, options: LayerSkipOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        target = parts.target
        if not target.supports_skip:
            raise InvalidOptionError(
                f"layer_skip cannot draft with {target.name}: this model cannot leave layers out; "
                "use --drafter ngram or small_model"
            )
        self.exit: EarlyExit | None = None
        if options.head == NONE:
            self.skip = choose_skip(options, target)
        else:
            self.exit = parts.once(
                ("layer_skip", options), lambda: open_exit(options.head, options.layers, options.skip != AUTO, parts)
            )
            self.skip = blocks_after(self.exit.block, target.num_layers)

    def new_session(self) -> LayerSkipSession:
        return LayerSkipSession(self)


def choose_skip(options: LayerSkipOptions, target: LanguageModel) -> Sublayers:
    """The sublayers that ``options`` leave out of ``target``.

    Raises:
        InvalidOptionError: for layers or sublayers that the target lacks, or when a searched subset was asked for and
            there is none.
        ModelFileError: for a stored subset that is damaged.
    """
    if options.layers and options.skip != AUTO:
        raise InvalidOptionError(
            f"layer_skip takes layers={options.layers} or skip={options.skip}, not both; leave one out"
        )
    if options.layers >= target.num_layers:
        raise InvalidOptionError(
            f"layer_skip layers={options.layers} must be below the target's {target.num_layers} layers"
        )
    if options.layers:
        return blocks_after(options.layers, target.num_layers)
    if options.skip not in (AUTO, SEARCHED):
        return parse_skip(options.skip, target.num_layers)
    subset = find_subset(target)
    if subset is not None:
        return parse_skip(subset.skip, target.num_layers)
    if options.skip == SEARCHED:
        raise InvalidOptionError(
            f"layer_skip skip=searched: no subset was searched for '{target.name}'; run 'outrider tune layers' with "
            "this model, or leave skip out"
        )
    if target.num_layers == 1:
        raise InvalidOptionError(f"layer_skip cannot draft with '{target.name}': it has only one layer")
    return blocks_after(max(1, target.num_layers * 2 // 3), target.num_layers)


class LayerSkipSession(GrowingSession):
    """Only the text is kept between steps; all entries live in the target's cache."""

    def __init__(self, drafter: LayerSkip) -> None:
        super().__init__(drafter.shape)
        self.skip = drafter.skip
        self.exit = drafter.exit

    def grow(self, limits: GrowLimits) -> TokenTree:
        with self.context.target_cache.speculation():
            return self.shape.grow(self.tokens[-1], self._source(), limits)

    def _source(self) -> RowSource:
        context = self.context
        where = ("layer_skip", context.target, context.target_cache, context.pipeline, self.output)
        return ModelSource(*where, skip=self.skip) if self.exit is None else ExitSource(*where, self.exit)
