"""Draft with a second, smaller language model that shares the target's tokenizer.

Leviathan et al. 2023 (arXiv 2211.17192) for chains; SpecInfer (Miao et al. 2024, section 3) for token trees. The draft
cache covers the committed text, or a recent part of it (``DraftWindow``), up to the last token that the draft model has
seen; after a step the entries of accepted nodes are kept and all others forgotten, so the cache equals a fresh prefill
of the text that it covers. Guesses come from what the draft model sees; the target decides, so a window that hides the
text's beginning changes how many guesses are accepted, never the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession, Observation
from outrider.drafters.model_source import ModelSource
from outrider.errors import InvalidOptionError
from outrider.models.base import LanguageModel, common_prefix, extend_cache
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

_SMALLEST_WINDOW = 4
_MOST_GUESSES_AHEAD = 64
"""Positions of a draft context that an automatic window leaves to guesses, at most a quarter of the context."""


WindowOption = Annotated[
    int, Field(ge=0, description="tokens of recent text that the draft model sees; 0: all that its context holds")
]


class SmallModelOptions(DraftOptions):
    """Options of ``SmallModel``."""

    window: WindowOption = 0


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """Which recent part of a text the draft cache covers: at most ``size`` tokens, the whole text when ``size`` is 0.

    The part starts at a multiple of half the size, so it depends on the text's length alone, not on how the text was
    split into steps; and it moves once in ``size / 2`` committed tokens, each time evaluating again at most the half
    that stays and the guesses just accepted: about one token for each committed one, however long the text grows.
    """

    size: int = 0

    def start(self, length: int) -> int:
        """Index of the first covered token of a text of ``length`` tokens."""
        if self.size == 0 or length <= self.size:
            return 0
        half = self.size // 2
        return -(-(length - self.size) // half) * half


class SmallModel(Drafter):
    """A small causal model, any shape."""

    Options: ClassVar[type[DraftOptions]] = SmallModelOptions
    positional: ClassVar[str | None] = "window"
    samples = True
    needs_draft_model = True
    default_shape = "chain:5"
    summary = "a smaller model with the same tokenizer"
    source = "Leviathan et al. 2023; SpecInfer (Miao et al. 2024)"

    def __init__(self, options: SmallModelOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        if parts.draft_model is None:
            raise ValueError("small_model was built without a draft model")
        self.model = parts.draft_model
        self.window = choose_window(options.window, self.model, parts.target.context_length)

    def new_session(self) -> SmallModelSession:
        return SmallModelSession(self.model, self.shape, self.window)


def choose_window(asked: int, model: LanguageModel, needed: int) -> DraftWindow:
    """The window of ``asked`` tokens; for 0 the one that a draft context shorter than ``needed`` positions takes.

    Raises:
        InvalidOptionError: for a window that leaves no room for guesses in the draft model's context, or that is tiny.
    """
    context = model.context_length
    largest = context - min(_MOST_GUESSES_AHEAD, max(1, context // 4))
    if asked == 0:
        return DraftWindow(largest if context < needed and largest >= _SMALLEST_WINDOW else 0)
    if asked < _SMALLEST_WINDOW:
        raise InvalidOptionError(
            f"a draft window={asked} is too short to draft from; give {_SMALLEST_WINDOW} or more, or 0 for no limit"
        )
    if asked > largest:
        raise InvalidOptionError(
            f"a draft window={asked} leaves no room for guesses in the draft model's context of {context} tokens; "
            f"give at most {largest}"
        )
    return DraftWindow(asked)


class SmallModelSession(GrowingSession):
    """Draft cache and text of one sequence; ``covered`` is the part of the text that the cache holds.

    ``reread`` counts the covered tokens that were given up to be evaluated again because the window moved.
    """

    def __init__(self, model: LanguageModel, shape: Shape, window: DraftWindow | None = None) -> None:
        super().__init__(shape)
        self.model = model
        self.cache = model.new_cache()
        self.window = window or DraftWindow()
        self.start = 0  # index in ``tokens`` of the cache's first entry
        self.reread = 0
        self._source: ModelSource | None = None

    @property
    def covered(self) -> list[int]:
        """The committed tokens whose entries the cache holds, at positions 0, 1, ..."""
        return self.tokens[self.start : self.start + self.cache.length]

    def begin(self, context: DraftContext) -> None:
        self.end()
        covered = self.covered
        super().begin(context)
        start = self.window.start(len(self.tokens))
        self._restart(start, common_prefix(covered, self.tokens[start:]) if start == self.start else 0)

    def grow(self, limits: GrowLimits) -> TokenTree:
        start = self.window.start(len(self.tokens))
        depth = min(limits.max_depth, self.model.context_length - (len(self.tokens) - start))
        if depth < 1:
            return TokenTree(self.tokens[-1])
        if start != self.start:
            self.reread += max(0, self.start + self.cache.length - start)
            self._restart(start)
        # Tokens added to the target's tokenizer alone have no row here; any known one may stand for them.
        pending = [min(token, self.model.vocab_size - 1) for token in self.tokens[start + self.cache.length :]]
        limits = replace(limits, max_depth=depth)
        self._source = self._open_source(pending, limits)
        return self.shape.grow(self.tokens[-1], self._source, limits)

    def _open_source(self, pending: list[int], limits: GrowLimits) -> ModelSource:
        """Where the tree's candidates come from, once the ``pending`` committed tokens, root last, are evaluated."""
        root_rows = extend_cache(self.model, self.cache, pending, wants_logits=True)
        return ModelSource("small_model", self.model, self.cache, self.context.pipeline, self.output, root_rows)

    def observe(self, observation: Observation) -> None:
        if self.tree is not None and self._source is not None:
            # The last committed token is the next root: it stays pending even when it was forwarded as a guess, so
            # that its logits are computed on the committed text.
            path = self.tree.walk(observation.committed[:-1])
            self.cache.commit([self._source.slots[node] for node in path if node in self._source.slots])
        self._source = None
        super().observe(observation)

    def end(self) -> None:
        super().end()
        self.cache.rollback()
        self._source = None

    def _restart(self, start: int, shared: int = 0) -> None:
        """Cover the text from ``start`` on; the first ``shared`` entries are right already."""
        self.start = start
        if self.cache.can_truncate(shared):
            self.cache.truncate(shared)
        else:
            self.cache = self.model.new_cache()
