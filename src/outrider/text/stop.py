"""Stop strings, matched on text and reported in tokens.

A stop string may begin in one token and end in another, or span steps. ``StopStrings`` reads the kept tokens one by one
and says with which token the first stop string is complete; tokens after it must not be kept. Which text may be shown
is answered without state by ``trim`` and ``safe_length``. Knows nothing of caches or of end-of-sequence ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.text.detokenize import REPLACEMENT, IncrementalDetokenizer
from outrider.text.tokenizer import Tokenizer


class StopStrings:
    """One request's stop strings.

    Args:
        tokenizer: whose ids are pushed.
        strings: texts that end the output; the output does not contain them. One that is a special token's own
            text is also matched by its id, since special tokens leave no text.

    Pushing on after a hit means that it was not acted on (``min_tokens``): the text up to there no longer counts.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        by_id = ((text, tokenizer.backend.token_to_id(text)) for text in self._strings)
        self._ids = {index for _, index in by_id if index in tokenizer.special_ids}
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._tail = ""  # the end of the text so far, long enough for a stop string that has begun
        self._dropped = 0  # characters of the text before the tail
        self._floor = 0  # matches that end here or earlier don't count
        self._hit_end: int | None = None  # where the text ended at the last hit

    def push(self, tokens: Sequence[int]) -> int | None:
        """Take the tokens of a step.

        Returns:
            How many of them are needed to complete the earliest stop string, or ``None``. Tokens after those were
            not taken.
        """
        if not self._strings:
            return None
        for index, token in enumerate(tokens):
            if self._completes(int(token)):
                return index + 1
        return None

    def trim(self, text: str) -> str:
        """The request's whole text, cut where the stop string that is complete first begins."""
        match = self._first_match(text, self._floor)
        return text if match is None else text[: match[0]]

    def safe_length(self, text: str) -> int:
        """How many characters of the request's whole text can be shown without the beginning of a stop string."""
        match = self._first_match(text, self._floor)
        if match is not None:
            return match[0]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                return start
        return len(text)

    def _completes(self, token: int) -> bool:
        if self._hit_end is not None:
            self._floor, self._hit_end = self._hit_end, None
        self._tail += self._detokenizer.push([token])
        # Held text counts too: a stop string made of byte tokens is complete with its last byte.
        text = self._tail + self._detokenizer.pending().rstrip(REPLACEMENT)
        is_hit = token in self._ids or self._first_match(text, self._floor - self._dropped) is not None
        if is_hit:
            self._hit_end = self._dropped + len(text)
        surplus = max(0, len(self._tail) - self._longest + 1)
        self._tail = self._tail[surplus:]
        self._dropped += surplus
        return is_hit

    def _first_match(self, text: str, floor: int) -> tuple[int, int] | None:
        """(start, end) of the stop string that ends first after ``floor``; of those, the one that starts first."""
        best: tuple[int, int] | None = None
        for string in self._strings:
            start = text.find(string, max(0, floor - len(string) + 1))
            if start < 0:
                continue
            match = (start, start + len(string))
            if best is None or (match[1], match[0]) < (best[1], best[0]):
                best = match
        return best
