"""Whether two tokenizers agree on what ids mean: a drafter's guesses are only useful to a target that reads them alike.

Compares spellings id by id up to the smaller tokenizer; ids beyond it, and padding rows, do not matter (a target
never needs them proposed, and a drafter that proposes one is refused by the verifier at no cost to exactness).
"""

from __future__ import annotations

import hashlib
import json
import re

from outrider.text.tokenizer import Tokenizer

_PADDING = re.compile(r"\[PAD\d+\]|\[unused\d+\]|<unused_?\d+>|<pad_?\d+>|<\|(extra|unused|reserved|dummy)\w*\|>")


def explain_difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """The first id that the two read differently, in words; ``None`` when they share their vocabulary."""
    first, second = _spellings(a), _spellings(b)
    shared = min(a.vocab_size, b.vocab_size)
    differing = [
        index
        for index in range(shared)
        if (x := first.get(index)) != (y := second.get(index)) and not _is_padding(x) and not _is_padding(y)
    ]
    if not differing:
        return None
    index = differing[0]
    return (
        f"{len(differing)} of {shared} shared ids mean different tokens; the first is {index}: "
        f"{first.get(index)!r} in one, {second.get(index)!r} in the other"
    )


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether every id up to the smaller tokenizer means the same token in both."""
    return a is b or explain_difference(a, b) is None


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 (hex) of every token's spelling and id: what a file of token ids says about its tokenizer."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.vocabulary().items())).encode()).hexdigest()


def _spellings(tokenizer: Tokenizer) -> dict[int, str]:
    return {index: text for text, index in tokenizer.vocabulary().items()}


def _is_padding(text: str | None) -> bool:
    return text is None or _PADDING.fullmatch(text) is not None
