"""Draft with a second, smaller language model that shares the target's tokenizer.

Leviathan et al. 2023 (arXiv 2211.17192) for chains; SpecInfer (Miao et al. 2024, section 3) for token trees. The draft
cache covers the committed text up to the last token that the draft model has seen; after a step the entries of accepted
nodes are kept and all others forgotten, so the cache equals a fresh prefill of the text that it covers.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.drafters.base import DraftContext, Drafter, GrowingSession, Observation
from outrider.drafters.model_source import ModelSource
from outrider.models.base import LanguageModel, Segment
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

_PREFILL_ROWS = 512


class SmallModel(Drafter):
    """A small causal model, any shape."""

    samples = True
    needs_draft_model = True
    default_shape = "chain:5"
    summary = "a smaller model with the same tokenizer"
    source = "Leviathan et al. 2023; SpecInfer (Miao et al. 2024)"

    def new_session(self) -> SmallModelSession:
        if self.parts.draft_model is None:
            raise ValueError("small_model was built without a draft model")
        return SmallModelSession(self.parts.draft_model, self.shape)


class SmallModelSession(GrowingSession):
    """Draft cache and text of one sequence; ``tokens[:cache.length]`` is what the cache covers."""

    def __init__(self, model: LanguageModel, shape: Shape) -> None:
        super().__init__(shape)
        self.model = model
        self.cache = model.new_cache()
        self._source: ModelSource | None = None

    def begin(self, context: DraftContext) -> None:
        self.end()
        covered = self.tokens[: self.cache.length]
        shared = 0
        while shared < min(len(covered), len(context.prompt)) and covered[shared] == context.prompt[shared]:
            shared += 1
        if self.cache.can_truncate(shared):
            self.cache.truncate(shared)
        else:
            self.cache = self.model.new_cache()
        super().begin(context)

    def grow(self, limits: GrowLimits) -> TokenTree:
        depth = min(limits.max_depth, self.model.context_length - len(self.tokens))
        if depth < 1:
            return TokenTree(self.tokens[-1])
        # The pending committed tokens, root last, become part of the prefix before any guess is evaluated.
        pending = self.tokens[self.cache.length :]
        for start in range(0, len(pending), _PREFILL_ROWS):
            # Tokens added to the target's tokenizer alone have no row here; any known one may stand for them.
            chunk = [min(token, self.model.vocab_size - 1) for token in pending[start : start + _PREFILL_ROWS]]
            root_rows = self.model.forward([Segment(self.cache, chunk, logit_rows=[len(chunk) - 1])])[0].logits
            self.cache.commit(range(len(chunk)))
        self._source = ModelSource("small_model", self.model, self.cache, self.context.pipeline, self.output, root_rows)
        return self.shape.grow(self.tokens[-1], self._source, replace(limits, max_depth=depth))

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
