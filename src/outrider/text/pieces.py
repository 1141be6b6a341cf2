"""What a token of a vocabulary stands for, in bytes.

Byte-level BPE spells every byte as a printable character (``Ġthe``), SentencePiece spells a space as ``▁`` and bytes
without a piece as ``<0x0A>``; other vocabularies spell text as it is. Works on the ``tokenizers`` library's own object
and knows nothing of ids, special tokens or text encoding rules.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from outrider.text.gguf_tokenizer import SPACE

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def decoder_kinds(backend: Backend) -> tuple[str, ...]:
    """Names of the decoder's steps, in order; empty without a decoder."""
    decoder = backend.decoder
    if decoder is None:
        return ()
    state = json.loads(decoder.__getstate__())
    return tuple(part["type"] for part in state.get("decoders", [state]))


def is_byte_level(kinds: tuple[str, ...]) -> bool:
    """Whether a decoder of these kinds reads GPT-2's byte alphabet."""
    return kinds == ("ByteLevel",)


def has_byte_fallback(kinds: tuple[str, ...]) -> bool:
    """Whether ``<0x0A>`` is a byte."""
    return "ByteFallback" in kinds


def piece_bytes(spelling: str, kinds: tuple[str, ...]) -> bytes:
    """The bytes that a spelling adds to a text, under a decoder of these kinds."""
    if is_byte_level(kinds):
        return byte_level_bytes(spelling)
    if has_byte_fallback(kinds) and BYTE_TOKEN.fullmatch(spelling):
        return bytes([int(spelling[3:5], 16)])
    if {"Replace", "Metaspace", "ByteFallback"} & set(kinds):
        spelling = spelling.replace(SPACE, " ")
    return spelling.encode()


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Inverse of GPT-2's table that shows every byte as a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("the tokenizers library changed its byte alphabet; text would come out wrong")
    return table


@lru_cache(maxsize=4096)
def byte_level_bytes(spelling: str) -> bytes:
    """A byte-level spelling's bytes; one outside the byte alphabet (an added token) stands for itself."""
    table = _byte_of_character()
    if all(character in table for character in spelling):
        return bytes(table[character] for character in spelling)
    return spelling.encode()
