"""Incremental detokenisation: text for people while tokens arrive.

Gives out only text that no later token can change: never half of a character, and the deltas together equal
``Tokenizer.decode`` of all tokens, whatever the split into pushes. Cost is linear: byte-level tokenizers keep the bytes
of at most one unfinished character, others decode a window that starts at the last settled token. Knows nothing of
stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from outrider.text.pieces import BYTE_TOKEN, byte_level_bytes, has_byte_fallback, is_byte_level
from outrider.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """One sequence's running text.

    Args:
        tokenizer: whose ids are pushed.
        skip_special_tokens: leave special tokens out, as ``Tokenizer.decode`` does.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._strategy: _Strategy = (
            _ByteStream(tokenizer, skip_special_tokens)
            if is_byte_level(tokenizer.decoder_kinds)
            else _Window(tokenizer, skip_special_tokens)
        )

    def push(self, tokens: Sequence[int]) -> str:
        """Take further tokens; returns the text that became final (often one token's, sometimes none)."""
        return "".join(self._strategy.push(int(token)) for token in tokens)

    def pending(self) -> str:
        """The text that is held back, as ``flush`` would give it now; changes nothing."""
        return self._strategy.pending()

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence (U+FFFD for bytes of an unfinished character)."""
        return self._strategy.flush()


class _Strategy(Protocol):
    def push(self, token: int) -> str: ...
    def pending(self) -> str: ...
    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level BPE: every token is a run of bytes, and the text is their UTF-8 reading."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._backend = tokenizer.backend
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        text = None if token in self._skipped else self._backend.id_to_token(token)
        return "" if text is None else self._decoder.decode(byte_level_bytes(text))

    def pending(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", errors="replace")

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _Window:
    """Any other decoder: decode from the last settled token on, and give out what follows it.

    Byte-fallback tokens are held until their run ends, because the run is read as a whole. The settled token in front
    keeps the decoder from treating the window as the start of a text (SentencePiece drops a leading space there).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_fallback = has_byte_fallback(tokenizer.decoder_kinds)
        self._anchor: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        text = None if token in self._skipped else self._tokenizer.backend.id_to_token(token)
        if text is None:
            return ""
        self._held.append(token)
        if self._byte_fallback and BYTE_TOKEN.fullmatch(text):
            return ""
        delta = self.pending()
        if not self._byte_fallback and delta.endswith(REPLACEMENT):
            return ""  # an unknown decoder that may join bytes over tokens
        self._anchor, self._held = [token], []
        return delta

    def pending(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._anchor, self._skip)
        return self._tokenizer.decode(self._anchor + self._held, self._skip)[len(before) :]

    def flush(self) -> str:
        delta = self.pending()
        self._anchor, self._held = self._anchor + self._held, []
        return delta
