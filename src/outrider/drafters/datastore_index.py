"""Token sequences with a suffix array: what retrieval drafting (REST, He et al. 2024, arXiv:2311.08252) looks its
contexts up in.

Documents lie one after another, each followed by ``SEPARATOR``, so that no continuation runs into the next one. The
suffix array sorts by the first ``SORTED`` tokens only: more is never looked at, and text that repeats itself endlessly
costs no more than other text. Knows token ids only: no files, no text, no tokenizer, no model.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidOptionError

SEPARATOR = -1
SORTED = 64
"""Tokens that the order of suffixes looks at, so the longest context that can be looked up."""

Tokens = NDArray[np.int32]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """Where a store's tokens came from.

    Attributes:
        vocab_size: tokens that the tokenizer knows.
        vocabulary: SHA-256 (hex) of the tokenizer's vocabulary.
        model: the model whose tokenizer it was, as the user named it.
        sources: the files.
    """

    vocab_size: int
    vocabulary: str
    model: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Tokens int32 [n] with ``SEPARATOR`` after every document, and their suffix array int64 [n]."""

    header: StoreHeader
    tokens: Tokens
    suffixes: Positions

    def matches(self, text: Sequence[int], shortest: int, longest: int, most: int) -> tuple[int, Positions]:
        """Where the longest end of ``text`` that occurs in the store is followed by something.

        Args:
            text: token ids.
            shortest, longest: lengths of the end that are looked for, at most ``SORTED``.
            most: positions returned at most; of more occurrences, evenly many of each continuation.

        Returns:
            The length and the positions of the tokens (or separators) that follow, int64 [<= most]; 0 and none when
            not even the ``shortest`` end occurs.
        """
        low, high, span = shortest - 1, min(longest, len(text)), range(0)
        # If a context occurs then so does each of its ends: the longest one is found by bisection.
        while low < high:
            middle = (low + high + 1) // 2
            found = self._find(list(text[-middle:]))
            if found:
                low, span = middle, found
            else:
                high = middle - 1
        if not span:
            return 0, np.empty(0, dtype=np.int64)
        if len(span) > most:
            chosen = np.linspace(span.start, span.stop - 1, most).astype(np.int64)
            return low, np.asarray(self.suffixes[chosen]) + low
        return low, np.asarray(self.suffixes[span.start : span.stop]) + low

    def _find(self, context: list[int]) -> range:
        """Indices into ``suffixes`` of those that begin with ``context``."""
        length, tokens = len(context), self.tokens

        def spelled(position: int) -> list[int]:
            found: list[int] = tokens[position : position + length].tolist()
            return found

        first = bisect_left(self.suffixes, context, key=spelled)
        return range(first, bisect_right(self.suffixes, context, lo=first, key=spelled))


def sort_suffixes(tokens: Tokens, progress: Callable[[int, int], None] | None = None) -> Positions:
    """Positions of all suffixes in the order of their first ``SORTED`` tokens, equal ones as they come, int64 [n].

    Prefix doubling (Manber and Myers 1990): knowing the order by k tokens gives the order by 2k in one sort.

    Args:
        tokens: int32 [n].
        progress: told how many rounds of how many are done.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1  # 0 stands for the end
    order: Positions = np.argsort(rank, kind="stable")
    rounds = SORTED.bit_length() - 1
    for done in range(rounds):
        if progress is not None:
            progress(done, rounds)
        step = 1 << done  # tokens that rank tells apart
        key = rank * (rank.max(initial=0) + 1)
        key[:-step] += rank[step:]
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank[order[:1]] = 1
        rank[order[1:]] = 1 + np.cumsum(ordered[1:] != ordered[:-1])
    return order


def build_store(
    header: StoreHeader, documents: Sequence[Sequence[int]], progress: Callable[[int, int], None] | None = None
) -> TokenStore:
    """A store of ``documents``, token ids each; ``progress`` as for ``sort_suffixes``.

    Raises:
        InvalidOptionError: when there is no token in them.
    """
    if not any(documents):
        raise InvalidOptionError("there is no text to build a datastore of; give files that are not empty")
    parts = [np.asarray([*document, SEPARATOR], dtype=np.int32) for document in documents if document]
    tokens = np.concatenate(parts)
    return TokenStore(header, tokens, sort_suffixes(tokens, progress))
