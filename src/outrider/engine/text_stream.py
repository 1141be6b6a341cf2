"""Tokens -> printable text: UTF-8 safe, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.text.detokenize import IncrementalDetokenizer
from outrider.text.stop import StopStrings
from outrider.text.tokenizer import Tokenizer
from outrider.types import FinishReason


class TextStream:
    """The text of one request; deltas concatenate to the final text."""

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings | None) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = stops
        self._text = ""
        self._shown = 0

    def push(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """The text that ``tokens`` make printable; at the end (``finish``) also everything that was held back.

        A final stop token is not shown even when it has a text, nor is anything of the stop string that ended the
        text; a stop string that did not count (``min_tokens``) is.
        """
        if finish is FinishReason.STOP_TOKEN:
            tokens = tokens[:-1]
        self._text += self._detokenizer.push(tokens)
        end = len(self._text)
        if finish is not None:
            # A limit may cut a character in two; its first bytes are kept in the tokens but are no text.
            self._text += self._detokenizer.flush().rstrip("\ufffd")
            if self._stops is not None and finish is FinishReason.STOP_STRING:
                self._text = self._stops.trim(self._text)
            end = len(self._text)
        elif self._stops is not None:
            end = self._stops.safe_length(self._text)
        delta = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return delta

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return self._text[: self._shown]
