"""Between the tokens of two tokenizers: what a draft model with another vocabulary needs.

Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous
vocabularies" (arXiv 2502.05202): text-level re-encoding (their SLEM) and the intersection of the vocabularies (their
TLI). A token of one is a token of the other when both stand for the same bytes, however they are spelled; special
tokens pair by name, or by ending the answer in the same way. Knows nothing of models: ids are those of the tokenizers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outrider.text.pieces import piece_bytes
from outrider.text.tokenizer import Tokenizer
from outrider.text.vocabulary import same_vocabulary

Ids = NDArray[np.int64]

_ANCHOR = "\n"
"""Text in front of a continuation while it is encoded, so that it is not read as the beginning of a text."""

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class Reencoder:
    """Encodes pieces of a running text with one tokenizer: no second beginning-of-sequence token, every space kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_id
        self.adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
        first = tokenizer.encode("a", add_special_tokens=False)[:1]
        self.adds_space = bool(first) and tokenizer.token_bytes(first[0]).startswith(b" ")
        self._anchor_ids = tokenizer.encode(_ANCHOR, add_special_tokens=False)

    def encode(self, text: str, is_start: bool = False) -> list[int]:
        """Tokens of ``text``, which begins a text or continues one."""
        if not text:
            return []
        if is_start or not self.adds_space:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids = self.tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        count = len(self._anchor_ids)
        return ids[count:] if ids[:count] == self._anchor_ids else self.tokenizer.encode(text, add_special_tokens=False)

    def encode_after(self, pending: bytes, data: bytes) -> list[int]:
        """Tokens of ``data`` behind a text that ends with the bytes ``pending`` of an unfinished character.

        Bytes at the end of ``data`` that are no whole character are left out.
        """
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(pending + data)
        ids = self.encode(text)
        missing = len(pending)
        while missing > 0 and ids and (size := len(self.tokenizer.token_bytes(ids[0]))) <= missing:
            missing -= size
            ids = ids[1:]
        # A token that reaches over the border cannot follow the committed one; bytes by themselves can.
        return ids if missing == 0 else self.encode_bytes(data[: _continuation_bytes(data)])

    def encode_bytes(self, data: bytes) -> list[int]:
        """One token a byte, as far as the vocabulary has them."""
        ids: list[int] = []
        for byte in data:
            token = self.byte_ids.get(byte)
            if token is None:
                break
            ids.append(token)
        return ids

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Byte -> its token."""
        return {data[0]: token for data, token in self.by_bytes.items() if len(data) == 1}

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Bytes -> the token that stands for them; special tokens and padding excluded.

        Where two tokens stand for the same bytes, the one that is not a byte-fallback token is meant, then the lowest.
        """
        tokenizer = self.tokenizer
        fallback = {f"<0x{byte:02X}>" for byte in range(256)}
        items = sorted(tokenizer.vocabulary().items(), key=lambda item: (item[0] in fallback, item[1]))
        found: dict[bytes, int] = {}
        for spelling, token in items:
            if token not in tokenizer.special_ids and token < tokenizer.vocab_size:
                found.setdefault(piece_bytes(spelling, tokenizer.decoder_kinds), token)
        found.pop(b"", None)
        return found


class Translator:
    """Translates tokens of a target into a draft model's and back.

    ``target`` and ``draft`` are the two tokenizers; ``to_target`` and ``to_draft`` encode pieces of text with them.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.target = target
        self.draft = draft

    @cached_property
    def to_target(self) -> Reencoder:
        return Reencoder(self.target)

    @cached_property
    def to_draft(self) -> Reencoder:
        return Reencoder(self.draft)

    @cached_property
    def is_identity(self) -> bool:
        """Whether both read every id alike, padding rows and the declared kind of tokenizer apart."""
        return same_vocabulary(self.target, self.draft)

    @cached_property
    def shared(self) -> tuple[Ids, Ids]:
        """The shared vocabulary: target ids and the draft ids that stand for the same, each int64 [shared]."""
        if self.is_identity:
            both = np.arange(min(self.target.vocab_size, self.draft.vocab_size), dtype=np.int64)
            return both, both
        drafts = self.to_draft.by_bytes
        pairs = [(token, drafts[data]) for data, token in self.to_target.by_bytes.items() if data in drafts]
        pairs += [(target, draft) for target, draft in self.controls.items()]
        array = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    @cached_property
    def controls(self) -> dict[int, int]:
        """Target's special token -> the draft's special token of the same name or role (which way the answer ends)."""
        draft_names = {self.draft.token_text(token): token for token in sorted(self.draft.special_ids, reverse=True)}
        found = {
            token: draft_names[name]
            for token in sorted(self.target.special_ids)
            if (name := self.target.token_text(token)) in draft_names
        }
        taken = set(found.values())
        draft_ends = _ends_by_role(self.draft)
        for role, token in _ends_by_role(self.target).items():
            end = draft_ends.get(role)
            if token not in found and end is not None and end not in taken:
                found[token] = end
        return found

    @cached_property
    def controls_back(self) -> dict[int, int]:
        """Draft's special token -> the target's."""
        return {draft: target for target, draft in self.controls.items()}


def _ends_by_role(tokenizer: Tokenizer) -> dict[bool, int]:
    """The lowest id that ends the whole text (``True``) and that ends a turn (``False``)."""
    ends = sorted(token for token in tokenizer.eos_ids if token in tokenizer.special_ids)
    return {tokenizer.token_text(token) in _END_OF_TEXT: token for token in reversed(ends)}


def _continuation_bytes(data: Sequence[int]) -> int:
    """How many bytes at the front continue a UTF-8 character."""
    count = 0
    while count < len(data) and data[count] & 0xC0 == 0x80:
        count += 1
    return count
