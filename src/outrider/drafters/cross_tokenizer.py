"""Draft with a small model that has another tokenizer than the target.

Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous
vocabularies" (arXiv 2502.05202). Two ways: by text (``text_source.py``; deterministic guesses), or in the tokens that
the two vocabularies share (``models/shared_vocabulary.py``), where q is the draft's distribution restricted to them and
renormalised, put through the request's pipeline, and children are drawn from exactly that q.

The draft reads the committed text in its own tokens (``text/running_encoding.py``). Its cache holds a prefix of that
encoding after every step; what a new token of the target changed in it is forgotten and evaluated anew. Where encodings
and boundaries do not fit, guesses get worse; the output cannot change, since the verifier sees only the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession, Observation
from outrider.drafters.model_source import ModelSource
from outrider.drafters.small_model import WindowOption, choose_window
from outrider.drafters.text_source import TextSource
from outrider.errors import IllegalCombinationError
from outrider.models.base import SequenceCache, common_prefix, extend_cache
from outrider.models.shared_vocabulary import SharedVocabulary
from outrider.sampling.transform import LogitsPipeline
from outrider.text.running_encoding import RunningEncoding
from outrider.trees.shapes.base import Candidates, GrowLimits, Shape
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind


class Mode(StrEnum):
    """How guesses reach the target's vocabulary."""

    AUTO = "auto"
    TEXT = "text"
    INTERSECTION = "intersection"


class CrossTokenizerOptions(DraftOptions):
    """Options of ``CrossTokenizer``."""

    mode: Annotated[
        Mode,
        Field(description="text re-encoding, the shared vocabulary, or auto: text for deterministic guesses"),
    ] = Mode.AUTO
    window: WindowOption = 0


class CrossTokenizer(Drafter):
    """A small model with any tokenizer."""

    Options: ClassVar[type[DraftOptions]] = CrossTokenizerOptions
    positional: ClassVar[str | None] = "mode"
    samples = True
    needs_draft_model = True
    speaks_target_tokens = False
    default_shape = "chain:5"
    summary = "a smaller model with another tokenizer"
    source = "Timor et al. 2025, arXiv:2502.05202"

    def __init__(self, options: CrossTokenizerOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        if parts.draft_model is None or parts.translator is None:
            raise ValueError("cross_tokenizer was built without a draft model or without a translator")
        self.model = parts.draft_model
        self.translator = parts.translator
        self.mode = options.mode
        self.window = choose_window(options.window, self.model, parts.target.context_length)
        if options.mode is Mode.TEXT and shape.proposal is not ProposalKind.DETERMINISTIC:
            raise IllegalCombinationError(
                f"cross_tokenizer mode=text has no distribution to draw {shape.proposal.value} children from; "
                "use --proposal deterministic, or mode=auto"
            )

    @cached_property
    def by_text(self) -> bool:
        """Whether guesses are re-encoded text. Two equal vocabularies have nothing to re-encode."""
        is_fixed = self.shape.proposal is ProposalKind.DETERMINISTIC
        return is_fixed and self.mode is not Mode.INTERSECTION and not self.translator.is_identity

    @cached_property
    def shared(self) -> SharedVocabulary:
        """The draft model in the target's ids.

        Raises:
            IllegalCombinationError: when the two vocabularies have no token in common.
        """
        target_ids, draft_ids = (torch.from_numpy(ids) for ids in self.translator.shared)
        size = self.translator.target.vocab_size
        # Ids of a tokenizer beyond the rows of its model's head cannot be said or read.
        kept = (target_ids < min(size, self.parts.target.vocab_size)) & (draft_ids < self.model.vocab_size)
        if not bool(kept.any()):
            raise IllegalCombinationError(
                f"the tokenizer of draft model '{self.model.name}' has no token in common with the target's; "
                "use mode=text with --proposal deterministic"
            )
        return SharedVocabulary(self.model, target_ids[kept], draft_ids[kept], size)

    def new_session(self) -> CrossTokenizerSession:
        return CrossTokenizerSession(self)


class CrossTokenizerSession(GrowingSession):
    """One sequence's text in the draft's tokens, and the draft cache.

    Attributes:
        encoding: the committed text in the draft's tokens.
        covered: the draft tokens whose entries the cache holds; after ``observe`` a proper prefix of the window's part
            of ``encoding``.
    """

    def __init__(self, drafter: CrossTokenizer) -> None:
        super().__init__(drafter.shape)
        self.model = drafter.model
        self.translator = drafter.translator
        self.window = drafter.window
        self.cache = self.model.new_cache()
        self.covered: list[int] = []
        self.encoding = RunningEncoding(drafter.translator)
        self._shared = None if drafter.by_text else drafter.shared
        self._source: TextSource | _SharedSource | None = None

    def begin(self, context: DraftContext) -> None:
        self.end()
        super().begin(context)
        self.encoding = RunningEncoding(self.translator)
        self.encoding.extend(self.tokens)
        self._fit([], [])

    def grow(self, limits: GrowLimits) -> TokenTree:
        wanted = self._recent()
        depth = min(limits.max_depth, self.model.context_length - len(wanted))
        if depth < 1 or not wanted:
            return TokenTree(self.tokens[-1])
        rows = self._read(wanted)
        pipeline = self.context.pipeline
        source: TextSource | _SharedSource
        if self._shared is None:
            pending = self.encoding.pending
            source = TextSource(
                "cross_tokenizer", self.model, self.cache, self.translator, pending, rows[0], pipeline.vocab_size
            )
        else:
            source = _SharedSource(
                "cross_tokenizer", self._shared, self.cache, pipeline, self.output, self._shared.translate(rows)
            )
        self._source = source
        return self.shape.grow(self.tokens[-1], source, replace(limits, max_depth=depth))

    def observe(self, observation: Observation) -> None:
        guesses, slots = self._accepted(observation.committed)
        super().observe(observation)
        self.encoding.extend(observation.committed)
        self._fit(guesses, slots)
        self._source = None

    def end(self) -> None:
        super().end()
        self.cache.rollback()
        self._source = None

    def _recent(self) -> list[int]:
        """The part of the encoding that the draft model sees."""
        tokens = self.encoding.tokens
        return tokens[self.window.start(len(tokens)) :]

    def _read(self, wanted: Sequence[int]) -> Tensor:
        """Evaluate what the cache lacks of ``wanted``, which is at least its last token; returns that one's logits."""
        pending = wanted[len(self.covered) :]
        # Tokens that a tokenizer has beyond the rows of its model: any known one may stand for them.
        known = [min(token, self.model.vocab_size - 1) for token in pending]
        try:
            return extend_cache(self.model, self.cache, known, wants_logits=True)
        finally:  # an interrupted prefill has kept the chunks before
            self.covered.extend(pending[: self.cache.length - len(self.covered)])

    def _accepted(self, committed: Sequence[int]) -> tuple[list[int], list[int]]:
        """Draft tokens, and their scratch slots, that may continue the cache now that ``committed`` is text."""
        source = self._source
        if self.tree is None or source is None:
            return [], []
        if isinstance(source, TextSource):
            return source.drafted[: self.cache.scratch], list(range(self.cache.scratch))
        nodes = [node for node in self.tree.walk(committed) if node in source.slots]
        return [source.draft_of[self.tree.tokens[node]] for node in nodes], [source.slots[node] for node in nodes]

    def _fit(self, guesses: Sequence[int], slots: Sequence[int]) -> None:
        """Make the cache a proper prefix of the encoding: keep guesses that spell it, forget what it no longer says.

        The last token always stays pending, so that its logits are computed on the committed text.
        """
        wanted = self._recent()[:-1]
        kept = common_prefix(guesses, wanted[len(self.covered) :])
        self.cache.commit(slots[:kept])
        self.covered.extend(guesses[:kept])
        length = common_prefix(self.covered, wanted)
        if length == len(self.covered):
            return
        if self.cache.can_truncate(length):
            self.cache.truncate(length)
            del self.covered[length:]
        else:
            self.cache = self.model.new_cache()
            self.covered = []


class _SharedSource(ModelSource):
    """Candidates over the shared vocabulary; ``draft_of`` maps its ids to the draft's."""

    def __init__(
        self,
        name: str,
        model: SharedVocabulary,
        cache: SequenceCache,
        pipeline: LogitsPipeline,
        output: Sequence[int],
        root_rows: Tensor,
    ) -> None:
        super().__init__(name, model, cache, pipeline, output, root_rows)
        self.draft_of = model.draft_of

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._certain(found) for found in super().candidates(tree, nodes)]

    def _certain(self, found: Candidates) -> Candidates:
        """``found``, or all mass on one shared token where the request's parameters leave no shared token any mass."""
        q = found.probabilities
        if q is None or not bool(q[0].isnan()):
            return found
        one = torch.zeros_like(q)
        one[min(self.draft_of)] = 1.0
        return Candidates(probabilities=one)
