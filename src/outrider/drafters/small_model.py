"""Draft with a second, smaller language model that shares the target's tokenizer.

Leviathan et al. 2023 (arXiv 2211.17192) for chains; SpecInfer (Miao et al. 2024, section 3) for token trees. The draft
cache covers the committed text up to the last token that the draft model has seen; after a step the entries of accepted
nodes are kept and all others forgotten, so the cache equals a fresh prefill of the text that it covers.
"""

from __future__ import annotations

from outrider.drafters.base import DraftBudget, DraftContext, Drafter, DraftSession, Observation, Proposal
from outrider.drafters.model_source import ModelSource
from outrider.models.base import LanguageModel, Segment
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

_PREFILL_ROWS = 512


class SmallModel(Drafter):
    """A small causal model, any shape."""

    samples = True
    needs_draft_model = True
    summary = "a smaller model with the same tokenizer"
    source = "Leviathan et al. 2023; SpecInfer (Miao et al. 2024)"

    def new_session(self) -> SmallModelSession:
        if self.draft_model is None:
            raise ValueError("small_model was built without a draft model")
        return SmallModelSession(self.draft_model, self.shape)


class SmallModelSession(DraftSession):
    """Draft cache and text of one sequence; ``tokens[:cache.length]`` is what the cache covers."""

    def __init__(self, model: LanguageModel, shape: Shape) -> None:
        self.model = model
        self.shape = shape
        self.cache = model.new_cache()
        self.tokens: list[int] = []
        self._tree: TokenTree | None = None
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
        self.tokens = list(context.prompt)
        self._context = context

    def propose(self, budget: DraftBudget) -> Proposal:
        context = self._context
        depth = min(budget.max_depth, self.model.context_length - len(self.tokens))
        if depth < 1 or budget.max_nodes < 1:
            return Proposal(TokenTree(self.tokens[-1]))
        output = self.tokens[len(context.prompt) :]
        # The pending committed tokens, root last, become part of the prefix before any guess is evaluated.
        pending = self.tokens[self.cache.length :]
        for start in range(0, len(pending), _PREFILL_ROWS):
            # Tokens added to the target's tokenizer alone have no row here; any known one may stand for them.
            chunk = [min(token, self.model.vocab_size - 1) for token in pending[start : start + _PREFILL_ROWS]]
            root_rows = self.model.forward([Segment(self.cache, chunk, logit_rows=[len(chunk) - 1])])[0].logits
            self.cache.commit(range(len(chunk)))
        source = ModelSource("small_model", self.model, self.cache, context.pipeline, output, root_rows)
        limits = GrowLimits(budget.max_nodes, depth, len(output), context.random)
        self._tree, self._source = self.shape.grow(self.tokens[-1], source, limits), source
        return Proposal(self._tree)

    def observe(self, observation: Observation) -> None:
        if self._tree is not None and self._source is not None:
            # The last committed token is the next root: it stays pending even when it was forwarded as a guess, so
            # that its logits are computed on the committed text.
            path = self._tree.walk(observation.committed[:-1])
            seen = [self._source.slots[node] for node in path if node in self._source.slots]
            self.cache.commit(seen)
        self._tree = self._source = None
        self.tokens.extend(observation.committed)

    def end(self) -> None:
        self.cache.rollback()
        self._tree = self._source = None
