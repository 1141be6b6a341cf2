"""The draft vocabulary of a new head: the tokens that it is able to guess.

Chosen by how often the target wrote them in its answers (prompts do not count: nobody guesses them), as EAGLE-3 does
(arXiv 2503.01840) and FR-Spec showed to matter (arXiv 2502.14856). Chosen once: a head that is trained further keeps
its own, for its output rows mean those tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.errors import InvalidOptionError
from outrider.text.tokenizer import Tokenizer

LEAST_COVERAGE = 0.97
"""Below this share of answer tokens, acceptance visibly suffers: worth a warning."""


def choose_draft_ids(counts: Tensor, size: int, tokenizer: Tokenizer) -> Tensor | None:
    """The ``size`` tokens to guess, as ascending target ids int64 [size]; ``None`` when it is the whole vocabulary.

    End and special tokens, digits, the newline and single bytes are in, as far as they take half of the places (end
    tokens always); then the most frequent ones, then unused ids from the lowest.

    Args:
        counts: how often each token was written, int64 [target vocabulary].

    Raises:
        InvalidOptionError: when not even the end tokens fit.
    """
    total = len(counts)
    if size >= total:
        return None
    forced = sorted(index for index in tokenizer.eos_ids if index < total)
    if size < max(1, len(forced)):
        raise InvalidOptionError(f"--draft-vocab {size} has no room for the {len(forced)} end tokens; give more")
    chosen = dict.fromkeys(forced)
    for group in _groups(tokenizer, total):
        wanted = chosen | dict.fromkeys(group)
        if len(wanted) <= size // 2:
            chosen = wanted
    rank = counts.clone()
    rank[list(chosen)] = torch.iinfo(torch.int64).max
    # A stable sort leaves equally frequent tokens, unused ones among them, in the order of their ids.
    best = torch.argsort(rank, descending=True, stable=True)[:size]
    return best.sort().values


def coverage(counts: Tensor, draft_ids: Tensor | None) -> float:
    """Share of the tokens counted in ``counts`` that the draft vocabulary has; NaN when nothing was counted."""
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    return 1.0 if draft_ids is None else int(counts[draft_ids].sum()) / total


def _groups(tokenizer: Tokenizer, total: int) -> list[list[int]]:
    """Special tokens, digits, the newline, single bytes: rare ones among them still end or join most texts."""
    spelled = [(index, tokenizer.token_bytes(index)) for index in range(min(total, tokenizer.vocab_size))]
    single = [(index, text) for index, text in spelled if len(text) == 1]
    return [
        sorted(index for index in tokenizer.special_ids if index < total),
        [index for index, text in single if text.isdigit()],
        [index for index, text in single if text == b"\n"],
        [index for index, _ in single],
    ]
