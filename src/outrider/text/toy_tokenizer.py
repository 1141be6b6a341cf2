"""One token per character: the tokenizer of the toy model, so that the whole system runs without a download."""

from __future__ import annotations

import string

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from outrider.text.tokenizer import Tokenizer

_CHARACTERS = string.ascii_letters + " \n.,!?-'" + "0123"
_END = "<|endoftext|>"


def toy_tokenizer() -> Tokenizer:
    """65 tokens: the end token (id 0), then letters and a few marks; other characters become spaces."""
    vocabulary = {_END: 0} | {character: index for index, character in enumerate(_CHARACTERS, start=1)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([_END])
    return Tokenizer(backend, eos_ids=[0])
