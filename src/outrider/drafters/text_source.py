"""Candidates by text: a draft model goes on greedily in its own tokens, and what it wrote is read in the target's.

The string-level method (SLEM) of Timor et al. 2025 (arXiv 2502.05202). A guess is given out when the text shows where
it ends: another of the target's tokens begins behind it, or the draft ended. So the guesses are a chain, one candidate
a node, whatever the shape; they are deterministic, and the verifier decides. Knows nothing of shapes and verifiers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.base import LanguageModel, Segment, SequenceCache
from outrider.text.translate import Translator
from outrider.trees.shapes.base import Candidates
from outrider.trees.token_tree import TokenTree

_MOST_TOKENS_PER_GUESS = 8
"""Draft tokens that one guess may take, even if the text does not show where the target's token ends."""


class TextSource:
    """A ``ChildSource`` for one proposal.

    Args:
        name: recorded as the source of every node.
        model, cache: who drafts, and where its entries go; the caller rolls back or commits.
        translator: between the two tokenizers.
        pending: bytes of an unfinished character at the end of the committed text.
        root_row: the draft's logits [draft vocabulary] behind the committed text.
        vocab_size: the target's ids that may be proposed.

    Attributes:
        drafted: the draft's tokens; those that were evaluated have the scratch slots 0, 1, ...
    """

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        cache: SequenceCache,
        translator: Translator,
        pending: bytes,
        root_row: Tensor,
        vocab_size: int,
    ) -> None:
        self.name = name
        self.drafted: list[int] = []
        self._model = model
        self._cache = cache
        self._translator = translator
        self._pending = pending
        self._vocab_size = vocab_size
        self._row = root_row
        self._rest = b""  # drafted text that was not given out yet
        self._chances: list[tuple[int, float]] = []  # for every draft token in ``_rest``: where it begins, probability
        self._end: tuple[int, float] | None = None  # the target's end token, when the draft ended
        self._is_over = False
        self._chain: list[Candidates] = []

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        """The chain's next token for each of ``nodes``; none where the draft has no more to say."""
        return [self._at(tree.depths[node]) for node in nodes]

    def _at(self, depth: int) -> Candidates:
        while len(self._chain) <= depth:
            self._chain.append(self._next())
        return self._chain[depth]

    def _next(self) -> Candidates:
        ids = self._read()
        for _ in range(_MOST_TOKENS_PER_GUESS):
            if len(ids) > 1 or self._is_over:
                break
            self._draft()
            ids = self._read()
        if ids:
            return self._give(ids[0])
        if self._is_over and not self._rest and self._end is not None:
            (token, score), self._end = self._end, None
            return Candidates((token,), (score,))
        return Candidates()

    def _read(self) -> list[int]:
        """The target's tokens of the text that was not given out yet."""
        return self._translator.to_target.encode_after(self._pending, self._rest) if self._rest else []

    def _give(self, token: int) -> Candidates:
        data = self._translator.target.token_bytes(token)
        if not data or not self._rest.startswith(data) or token >= self._vocab_size:
            # The target's tokenizer rewrote the text (normalisation, unknown characters): nothing behind it lines up.
            self._is_over, self._rest, self._end = True, b"", None
            return Candidates()
        score = 1.0
        for start, chance in self._chances:
            score *= chance if 0 <= start < len(data) else 1.0
        self._chances = [(start - len(data), chance) for start, chance in self._chances if start >= len(data)]
        self._rest = self._rest[len(data) :]
        self._pending = _unfinished(self._pending + data)
        return Candidates((token,), (score,))

    def _draft(self) -> None:
        """One more token of the draft model."""
        if self.drafted:
            if self._cache.length + self._cache.scratch >= self._model.context_length:
                self._is_over = True
                return
            self._row = self._model.forward([Segment(self._cache, self.drafted[-1:])])[0].logits[0]
        draft = self._translator.draft
        row = self._row[: draft.vocab_size]
        token = int(row.argmax())
        chance = float(torch.softmax(row.float(), dim=-1)[token])
        if token in draft.special_ids or token in draft.eos_ids:
            end = self._translator.controls_back.get(token)
            self._end = None if end is None or end >= self._vocab_size else (end, chance)
            self._is_over = True
            return
        self._chances.append((len(self._rest), chance))
        self._rest += draft.token_bytes(token)
        self.drafted.append(token)


def _unfinished(data: bytes) -> bytes:
    """The bytes of a UTF-8 character that is not complete at the end of ``data``."""
    for count in range(1, min(3, len(data)) + 1):
        lead = data[-count]
        if lead & 0xC0 == 0x80:
            continue
        length = 2 if lead >> 5 == 0b110 else 3 if lead >> 4 == 0b1110 else 4 if lead >> 3 == 0b11110 else 1
        return data[-count:] if length > count else b""
    return b""
