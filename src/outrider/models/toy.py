"""A float64 table model: the fake that tests, docs and bug reports run on, without a download.

The logits of a row are a pseudo-random function (BLAKE2b, then PCG64) of the tokens that the row can see, ordered by
position. So any wrong mask, position, commit or rollback changes the output, and most raise ``ValueError`` at once:
a row at position p must see exactly one entry at each of the positions 0 ... p, and only entries that were computed
under the same prefix can be committed. Skipped sublayers give a distorted distribution (self-speculation is imperfect).
Knows nothing of text: there is no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidOptionError
from outrider.models.base import FINAL_HIDDEN, FULL, LanguageModel, Segment, SegmentOutput, Sublayers
from outrider.models.request import check_request
from outrider.models.toy_cache import IntArray, ToyCache, digest

__all__ = ["ToyCache", "ToyModel"]

_MEMO_ENTRIES = 20_000


class ToyModel(LanguageModel):
    """Pseudo-random next-token tables with four pretended blocks.

    Args:
        vocab_size: tokens.
        context_length: positions at most.
        order: how many of the last visible tokens count; ``None`` for the whole visible prefix, k for a Markov chain of
            order k (small enumerations), 0 for one fixed distribution.
        sharpness: scale of the logits; 0 is uniform, large is nearly deterministic.
        seed: which table.
        noise: share of probability mixed in from an unrelated table, so that a draft model ``ToyModel(noise=0.3)``
            agrees with the target ``ToyModel()`` most of the time.
        window: sliding window in positions (a row sees itself and ``window - 1`` before it).

    Raises:
        InvalidOptionError: for a value out of range.
    """

    name = "toy"
    num_layers = 4
    hidden_size = 8
    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(
        self,
        vocab_size: int = 64,
        context_length: int = 4096,
        order: int | None = None,
        sharpness: float = 2.0,
        seed: int = 0,
        noise: float = 0.0,
        window: int | None = None,
    ) -> None:
        at_least = (("vocab_size", vocab_size, 1), ("context_length", context_length, 1), ("order", order, 0))
        for option, value, minimum in (*at_least, ("window", window, 1), ("sharpness", sharpness, 0)):
            if value is not None and value < minimum:
                raise InvalidOptionError(f"{option}={value} is not allowed for a toy model: give at least {minimum}")
        if not 0.0 <= noise <= 1.0:
            raise InvalidOptionError(f"noise={noise} is not allowed for a toy model: it is a share between 0 and 1")
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.order = order
        self.sharpness = sharpness
        self.seed = seed
        self.noise = noise
        self.window = window
        self._table: Tensor | None = None
        self._memo: dict[tuple[bytes, float], Tensor] = {}

    @classmethod
    def from_table(cls, rows: Sequence[Sequence[float]], context_length: int = 4096) -> ToyModel:
        """A Markov chain of order 1: ``rows[a][b]`` is the probability of token b after token a.

        Raises:
            InvalidOptionError: when the table is not square or a row is not a distribution.
        """
        if not rows or any(len(row) != len(rows) for row in rows):
            raise InvalidOptionError(f"a toy table of {len(rows)} rows is not square: give one row for each token")
        table = torch.tensor(rows, dtype=torch.float64)
        if bool((table < 0).any()) or not torch.allclose(table.sum(-1), torch.ones(len(rows), dtype=torch.float64)):
            raise InvalidOptionError("a row of the toy table is not a distribution: give non-negative rows of sum 1")
        model = cls(vocab_size=len(rows), context_length=context_length, order=1)
        model._table = torch.log(table)
        return model

    @property
    def supports_skip(self) -> bool:
        return True

    def new_cache(self) -> ToyCache:
        return ToyCache(self.window)

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Logits, float64 [vocab_size], of a row that ends the plain text ``tokens``: the slow, obvious reference."""
        view = np.asarray(tokens, dtype=np.int64)
        return self._logits(view if self.window is None else view[-self.window :]).clone()

    def embed(self, tokens: Tensor) -> Tensor:
        rows = [self._hidden(np.array([token]), 0, FULL) for token in tokens.flatten().tolist()]
        return _stack(rows, self.hidden_size).view(*tokens.shape, self.hidden_size)

    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        """Fixed numbers: the toy's logits are a table, not a product with its hidden states."""
        ids = range(self.vocab_size) if tokens is None else tokens.tolist()
        return _stack(
            [_values(b"output %d %d" % (self.seed, token), self.hidden_size) for token in ids], self.hidden_size
        )

    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        """See ``LanguageModel.forward``; logits and hidden states are float64.

        Raises:
            ValueError: for a row that does not see exactly its prefix, a token or position out of range, a cache given
                twice, or an unknown hidden state or sublayer.
            TypeError: for a cache of another kind of model.
        """
        check_request(segments, hidden, self.num_layers, skip)
        return [self._evaluate(segment, hidden, skip) for segment in segments]

    def _evaluate(self, segment: Segment, hidden: Sequence[str | int], skip: Sublayers) -> SegmentOutput:
        cache = segment.cache
        if not isinstance(cache, ToyCache):
            raise TypeError(f"a toy model cannot write to a {type(cache).__name__}")
        positions = segment.resolved_positions()
        for token, position in zip(segment.tokens, positions, strict=True):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is not in the vocabulary of {self.vocab_size}")
            if position >= self.context_length:
                raise ValueError(f"position {position} is beyond the context of {self.context_length}")
        views = cache.write(segment.tokens, positions, segment.mask, skip)
        wanted = range(len(views)) if segment.logit_rows is None else segment.logit_rows
        logits = _stack([self._logits(views[row], skip) for row in wanted], self.vocab_size)
        states = {name: _stack([self._hidden(v, name, skip) for v in views], self.hidden_size) for name in hidden}
        return SegmentOutput(logits, states)

    def _logits(self, view: IntArray, skip: Sublayers = FULL) -> Tensor:
        if self.order is not None:
            view = view[max(0, len(view) - self.order) :]
        # Skipping k of n sublayers mixes in k / n of an unrelated table.
        noise = 1.0 - (1.0 - self.noise) * (1.0 - len(skip) / (2 * self.num_layers))
        key = (digest(view), noise)
        logits = self._memo.get(key)
        if logits is None:
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            logits = self._memo[key] = self._compute_logits(view, *key)
        return logits

    def _compute_logits(self, view: IntArray, key: bytes, noise: float) -> Tensor:
        if self._table is not None:
            logits = self._table[int(view[-1])]
        else:
            logits = self.sharpness * _values(b"logits%d" % self.seed + key, self.vocab_size)
        if noise == 0.0:
            return logits
        other = self.sharpness * _values(b"noise%d" % self.seed + key, self.vocab_size)
        return torch.log((1 - noise) * torch.softmax(logits, -1) + noise * torch.softmax(other, -1))

    def _hidden(self, view: IntArray, name: str | int, skip: Sublayers) -> Tensor:
        # The input of block 0 is the embedding: it depends on the token alone.
        seen = view[-1:] if name == 0 else view
        depth = sorted(skip) if name == FINAL_HIDDEN else 0
        return _values(f"hidden {self.seed} {name} {depth} ".encode() + digest(seen), self.hidden_size)


def _values(key: bytes, size: int) -> Tensor:
    """float64 [size] of logistic noise, a function of ``key``. Raw bits keep it stable across NumPy versions."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little")
    bits = np.random.PCG64(seed).random_raw(size) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(np.log(uniform / (1.0 - uniform)))


def _stack(rows: Sequence[Tensor], width: int) -> Tensor:
    return torch.stack(list(rows)) if rows else torch.zeros((0, width), dtype=torch.float64)
