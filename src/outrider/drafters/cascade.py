"""A cheap drafter speeds up a dearer one: speculation inside the draft (Chen et al. 2023).

The cheap drafter guesses what the draft model will choose. The draft model evaluates these guesses together with the
last committed tokens in one pass, and the shape then grows its tree as it would without them: where a node was among
the guesses its distribution is there already, elsewhere the draft model is asked as usual. So the proposal is the draft
model's own, whatever the cheap drafter guesses, for every shape and kind of proposal; only the number of passes
differs. Knows no shape and no verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from outrider.drafters.base import (
    DraftBudget,
    DraftContext,
    Drafter,
    DraftOptions,
    DraftParts,
    DraftSession,
    GrowingSession,
    Observation,
)
from outrider.drafters.model_source import ModelSource
from outrider.drafters.small_model import DraftWindow, SmallModelSession, WindowOption, choose_window
from outrider.errors import InvalidOptionError
from outrider.models.base import LanguageModel, Segment, SequenceCache, extend_cache
from outrider.sampling.draw import OffsetStream
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree
from outrider.trees.topology import ancestors_mask

_MOST_PENDING = 16
"""Pending committed tokens evaluated together with the guesses; more of them (a prompt) are prefilled first."""


class CascadeOptions(DraftOptions):
    """Options of ``Cascade``."""

    cheap: Annotated[str, Field(description="the drafter that guesses for the draft model")] = "ngram"
    window: WindowOption = 0


class Cascade(Drafter):
    """A small model whose own decoding is speculated on."""

    Options: ClassVar[type[DraftOptions]] = CascadeOptions
    positional: ClassVar[str | None] = "cheap"
    samples = True
    needs_draft_model = True
    members_option = "cheap"
    default_shape = "chain:5"
    summary = "a smaller model, itself sped up by a cheaper drafter"
    source = "Cascade speculative drafting, Chen et al. 2023, arXiv:2312.11462"

    def __init__(self, options: CascadeOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        if len(parts.members) != 1:
            raise InvalidOptionError(f"cascade takes one cheap drafter, got '{options.cheap}': cascade:ngram")
        self.cheap = parts.members[0]
        self.hidden = self.cheap.hidden
        if parts.draft_model is None:
            raise ValueError("cascade was built without a draft model")
        self.model = parts.draft_model
        self.window = choose_window(options.window, self.model, parts.target.context_length)

    def new_session(self) -> CascadeSession:
        return CascadeSession(self.model, self.shape, self.window, self.cheap.new_session())


class CascadeSession(SmallModelSession):
    """A small model's session beside the cheap drafter's."""

    def __init__(self, model: LanguageModel, shape: Shape, window: DraftWindow, cheap: DraftSession) -> None:
        super().__init__(model, shape, window)
        self.cheap = cheap
        self._guesses: TokenTree | None = None
        self._pending = 0  # committed tokens at the start of the scratch entries

    def begin(self, context: DraftContext) -> None:
        super().begin(context)
        self.cheap.begin(replace(context, random=OffsetStream(context.random, 1)))

    def reusable(self, prompt: Sequence[int]) -> int:
        return self.cheap.reusable(prompt)

    def _open_source(self, pending: list[int], limits: GrowLimits) -> ModelSource:
        guesses = self.cheap.propose(DraftBudget(limits.max_nodes, limits.max_depth)).tree
        if len(pending) > _MOST_PENDING:
            extend_cache(self.model, self.cache, pending[:-1])
            del pending[:-1]
        self._guesses, self._pending = guesses, len(pending)
        return _PrefetchedSource(self.model, self.cache, self.context.pipeline, self.output, pending, guesses)

    def observe(self, observation: Observation) -> None:
        if self.tree is not None and self._source is not None:
            path = self.tree.walk(observation.committed[:-1])
            slots = [self._source.slots[node] for node in path if node in self._source.slots]
            self.cache.commit([*range(self._pending), *slots])
        self._source = None
        guesses, self._guesses, self._pending = self._guesses, None, 0
        accepted = observation.committed[: observation.accepted]
        own = 0 if guesses is None else len(guesses.walk(accepted))
        self.cheap.observe(replace(observation, accepted=own))
        GrowingSession.observe(self, observation)

    def end(self) -> None:
        super().end()
        self.cheap.end()
        self._guesses = None


class _PrefetchedSource(ModelSource):
    """A ``ModelSource`` that knows the rows of a tree of guesses beforehand.

    One pass evaluates ``pending`` (committed tokens, root last, kept as scratch entries so that the guesses can follow
    them) and all guesses.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: SequenceCache,
        pipeline: LogitsPipeline,
        output: Sequence[int],
        pending: Sequence[int],
        guesses: TokenTree,
    ) -> None:
        super().__init__("cascade", model, cache, pipeline, output)
        count, ahead = len(pending), len(pending) - 1
        parents = np.concatenate([np.arange(-1, ahead), guesses.parent_array()[1:] + ahead])
        self._visible = ancestors_mask(parents)
        self._root_position = cache.length + ahead
        positions = [
            *range(cache.length, cache.length + count),
            *(self._root_position + d for d in guesses.depths[1:]),
        ]
        tokens = [*pending, *(min(token, model.vocab_size - 1) for token in guesses.tokens[1:])]
        wanted = range(ahead, len(tokens))
        segment = Segment(cache, tokens, positions, self._visible, logit_rows=wanted)
        self._guess_rows = model.forward([segment])[0].logits
        self._guesses = guesses
        self._ahead = ahead
        self._twins = {0: 0}  # node of the grown tree -> the guess that spells the same path
        self.slots = {0: ahead}

    def evaluate(self, tree: TokenTree, nodes: Sequence[int]) -> Tensor:
        """Known rows where a node was guessed, one pass of the model for the other nodes."""
        for node in nodes:
            self._find_twin(tree, node)
        missing = [node for node in nodes if node not in self._twins]
        fresh = dict(zip(missing, super().evaluate(tree, missing), strict=True)) if missing else {}
        return torch.stack([self._guess_rows[self._twins[n]] if n in self._twins else fresh[n] for n in nodes])

    def _find_twin(self, tree: TokenTree, node: int) -> None:
        parent = self._twins.get(tree.parents[node]) if node else 0
        twin = 0 if node == 0 else None if parent is None else self._guesses.children(parent).get(tree.tokens[node])
        if twin is not None:
            self._twins[node] = twin
            self.slots[node] = self._ahead + twin
