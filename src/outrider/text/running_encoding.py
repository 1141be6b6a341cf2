"""A growing token sequence of one tokenizer, kept encoded by another.

The encoding is a function of the sequence alone, whatever pieces it arrived in: the text is cut into chunks at places
where tokenizers begin a new word anyway (a blank or a line break behind a letter or digit), each chunk is encoded once
and for all when the next one begins, and only the open chunk is encoded again as it grows. So a step costs the same
however long the text is, and what was encoded before is a prefix of what is encoded now, up to a few tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from outrider.text.translate import Translator

_CHUNK = 128
"""Characters in a chunk before a cut is looked for."""

_LONGEST_CHUNK = 2048
"""Characters after which a text without blanks is cut anywhere: one odd token there, but no growing cost."""


class RunningEncoding:
    """A target's text in the draft's tokens.

    Special tokens become the draft's own of the same name or role, and plain text where it has none. The draft's
    beginning-of-sequence token stands in front, once, when its tokenizer puts one there.
    """

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._is_identity = translator.is_identity
        self._is_empty = True
        self._closed: list[int] = []
        self._text = ""
        self._is_start = True
        self._has_written_blank = not self._is_identity and translator.to_target.adds_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        draft = translator.to_draft
        if not self._is_identity and draft.adds_bos and draft.tokenizer.bos_id is not None:
            self._closed.append(draft.tokenizer.bos_id)

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    @property
    def tokens(self) -> list[int]:
        """Draft tokens of everything so far; an unfinished character as byte tokens where there are such."""
        draft = self._translator.to_draft
        return [*self._closed, *draft.encode(self._text, self._is_start), *draft.encode_bytes(self.pending)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append target tokens."""
        if self._is_identity:
            self._closed.extend(tokens)
            return
        for token in tokens:
            self._push(token)
        self._cut()

    def _push(self, token: int) -> None:
        translator = self._translator
        is_first, self._is_empty = self._is_empty, False
        if is_first and token == translator.target.bos_id and translator.to_target.adds_bos:
            return  # the draft's own, if any, stands there already
        control = translator.controls.get(token)
        if control is None:
            data = translator.target.token_bytes(token)
            # SentencePiece writes one blank in front of a text's first word; it is not part of the text.
            self._text += self._decoder.decode(data.removeprefix(b" ") if self._has_written_blank else data)
            self._has_written_blank = False
            return
        self._close(self._text + self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._closed.append(control)
        self._text, self._is_start = "", True
        self._has_written_blank = translator.to_target.adds_space

    def _cut(self) -> None:
        at = _chunk_end(self._text)
        while at:
            self._close(self._text[:at])
            self._text = self._text[at:]
            at = _chunk_end(self._text)

    def _close(self, text: str) -> None:
        if text:
            self._closed.extend(self._translator.to_draft.encode(text, self._is_start))
            self._is_start = False


def _chunk_end(text: str) -> int:
    """Where the text's first chunk ends for good; 0 when it is still open."""
    for at in range(_CHUNK, min(len(text), _LONGEST_CHUNK)):
        if text[at] in " \n" and text[at - 1].isalnum():
            return at
    return _LONGEST_CHUNK if len(text) > _LONGEST_CHUNK else 0
