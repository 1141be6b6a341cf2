"""A sequence's state for recurrent heads (EAGLE, EAGLE-3, MTP): a cache of pairs made of the target's own features.

Every committed token comes with the hidden states of the row that predicted it; together they are a *pair*. New pairs
wait until the next proposal, when one pass of the head adds them to its cache; the tree then grows from the last
one's output in scratch entries, which are always forgotten. So after each step the cache equals a fresh computation
from target features, and never holds the head's own guesses (EAGLE, Li et al. 2024, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession, Observation
from outrider.drafters.feature_source import DraftVocabulary, FeatureSource
from outrider.drafters.head_options import RecurrentHeadOptions, compute_dtype, open_head
from outrider.heads.cached import CachedHead
from outrider.heads.config import Feature
from outrider.heads.network import RecurrentNetwork
from outrider.models.base import PREFILL_ROWS, LanguageModel, common_prefix
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

Features = dict[Feature, Tensor]


class RecurrentHeadDrafter(Drafter):
    """Base of the drafters with a recurrent head; subclasses say which method."""

    Options: ClassVar[type[DraftOptions]] = RecurrentHeadOptions
    positional: ClassVar[str | None] = "head"
    samples = True
    method: ClassVar[str]

    def __init__(self, options: RecurrentHeadOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.target = parts.target
        self.window = options.window
        self.head = parts.once((self.method, options), lambda: self._open(options))
        self.hidden = self.head.config.features

    def _open(self, options: RecurrentHeadOptions) -> CachedHead:
        network = open_head(self.method, options.head, self.parts)
        if not isinstance(network, RecurrentNetwork):
            raise TypeError(f"{self.method} is not a recurrent head")
        int4 = options.wants_int4(self.target)
        return CachedHead(network, compute_dtype(self.target), self.target.device, int4)

    def new_session(self) -> RecurrentHeadSession:
        return RecurrentHeadSession(self.method, self.head, self.target, self.shape, self.window)


class RecurrentHeadSession(GrowingSession):
    """``first`` is the row of the first cached pair: 0, unless a text's beginning is far back or was never observed.

    ``window``: of more new rows than this at once (a long prompt) the first ones are left out; 0 leaves out none.
    """

    def __init__(self, name: str, head: CachedHead, target: LanguageModel, shape: Shape, window: int = 0) -> None:
        super().__init__(shape)
        self.window = window
        self.name = name
        self.head = head
        self.target = target
        self.cache = head.new_cache()
        self.first = 0
        self._waiting: list[Features] = []  # features of pairs that are not in the cache yet
        self._waiting_rows = 0
        self._root_output: Tensor | None = None
        self._vocabulary: DraftVocabulary | None = None

    @property
    def known(self) -> int:
        """Pairs from ``first`` on whose features were observed."""
        return self.cache.length + self._waiting_rows

    def reusable(self, prompt: Sequence[int]) -> int:
        # Pair t holds token t + 1, so the pair at the last shared token's row is another one in the new text.
        shared = max(0, min(self.first + self.known, common_prefix(self.tokens, prompt) - 1))
        # A beginning that was left out is not missed while a whole window follows it; one that never came is.
        return shared if self.first == 0 or 0 < self.window <= shared - self.first else 0

    def begin(self, context: DraftContext) -> None:
        kept = min(self.reusable(context.prompt), context.target_cache.length)
        if kept > self.first + self.cache.length:
            self._extend()
        if kept > self.first:
            self._restart(self.first, kept - self.first)
        else:
            self._restart(0, 0)
        super().begin(context)
        self._vocabulary = DraftVocabulary(self.head.network.draft_ids, context.pipeline.vocab_size)

    def observe(self, observation: Observation) -> None:
        features = _joined(observation.prompt_hidden, observation.hidden, self.head.config.features)
        first = len(self.tokens) - 1 - _rows(observation.prompt_hidden)
        if first != self.first + self.known:
            # The target kept entries of a text that this session never saw: the head starts behind them.
            self._restart(first, 0)
        self._waiting.append(features)
        self._waiting_rows += _rows(features)
        super().observe(observation)

    @torch.inference_mode()
    def grow(self, limits: GrowLimits) -> TokenTree:
        self._extend()
        if self._root_output is None or self._vocabulary is None:
            return TokenTree(self.tokens[-1])
        source = FeatureSource(
            self.name,
            self.head,
            self.cache,
            self.target.embed,
            self._vocabulary,
            self.context.pipeline,
            self.output,
            self._root_output,
            len(self.tokens) - 2,
        )
        try:
            return self.shape.grow(self.tokens[-1], source, limits)
        finally:
            self.cache.rollback()

    def end(self) -> None:
        super().end()
        self.cache.rollback()

    @torch.inference_mode()
    def _extend(self) -> None:
        """Add the waiting pairs to the cache; the last one's output is what the tree grows from."""
        if not self._waiting:
            return
        features = _joined_all(self._waiting)
        if self.window and self._waiting_rows > self.window:
            first = self.first + self.known - self.window
            features = {name: state[-self.window :] for name, state in features.items()}
            self._restart(first, 0)
        self._waiting, self._waiting_rows = [], 0
        for start in range(0, _rows(features), PREFILL_ROWS):
            chunk = {name: state[start : start + PREFILL_ROWS] for name, state in features.items()}
            row = self.first + self.cache.length
            tokens = self.tokens[row + 1 : row + 1 + _rows(chunk)]
            token = self.target.embed(torch.tensor(tokens)).to(self.head.dtype)
            positions = range(row, row + len(tokens))
            output = self.head.forward(self.cache, token, self.head.fuse(chunk), positions)
            self.cache.commit()
            self._root_output = output[-1:]

    def _restart(self, first: int, kept: int) -> None:
        self.first = first
        self.cache.truncate(kept)
        self._waiting, self._waiting_rows = [], 0
        self._root_output = None


def _rows(features: Mapping[Feature, Tensor]) -> int:
    return next((len(state) for state in features.values()), 0)


def _joined(before: Mapping[Feature, Tensor], after: Mapping[Feature, Tensor], names: Sequence[Feature]) -> Features:
    return {name: torch.cat([before[name], after[name]]) if before else after[name] for name in names}


def _joined_all(parts: Sequence[Features]) -> Features:
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
