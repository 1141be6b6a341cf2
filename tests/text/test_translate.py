"""Between two vocabularies: which tokens are shared, and a growing text kept encoded by another tokenizer."""

from __future__ import annotations

import random

import pytest
from tiny_tokenizers import byte_level, byte_level_metadata, sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.text.running_encoding import RunningEncoding
from outrider.text.tokenizer import Tokenizer
from outrider.text.translate import Reencoder, Translator

TEXTS = [
    "hello  world",
    " the in  the",
    "  lead and trail  ",
    "a\n\nb\n c\td",
    "你好 hello 好",
    "😀 é x",
    "12 the in " * 40,
    "the\nin " * 90,
]


def pair(which: str) -> Translator:
    tokenizers = {"bytes": byte_level, "pieces": sentencepiece, "gemma": lambda: sentencepiece(False)}
    target, draft = which.split(">")
    return Translator(tokenizers[target](), tokenizers[draft]())


PAIRS = ["bytes>pieces", "pieces>bytes", "bytes>gemma", "gemma>bytes", "gemma>pieces", "pieces>gemma"]


@pytest.mark.parametrize("which", ["bytes>pieces", "pieces>bytes", "gemma>pieces"])
def test_token_bytes_spell_the_text(which: str) -> None:
    tokenizer = pair(which).target
    for text in TEXTS:
        data = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
        assert data.decode().removeprefix(" " if Reencoder(tokenizer).adds_space else "") == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 3) == b""


@pytest.mark.parametrize("which", PAIRS)
def test_shared_tokens_stand_for_the_same_bytes(which: str) -> None:
    """``Ġ`` against ``▁`` against ``<0x20>``; one to one; specials only by role; nothing beyond either vocabulary."""
    translator = pair(which)
    targets, drafts = (ids.tolist() for ids in translator.shared)
    assert len(targets) > 100
    assert len(set(targets)) == len(set(drafts)) == len(targets)
    assert max(targets) < translator.target.vocab_size
    assert max(drafts) < translator.draft.vocab_size
    for target, draft in zip(targets, drafts, strict=True):
        if target in translator.target.special_ids or draft in translator.draft.special_ids:
            assert translator.controls[target] == draft
        else:
            assert translator.target.token_bytes(target) == translator.draft.token_bytes(draft)


def test_what_is_shared_between_byte_level_and_sentencepiece() -> None:
    translator = pair("bytes>pieces")
    spelled = {
        translator.target.token_text(target): translator.draft.token_text(draft)
        for target, draft in zip(*(ids.tolist() for ids in translator.shared), strict=True)
    }
    assert spelled["he"] == "he"
    assert spelled["Ġ"] == "▁"
    assert spelled["a"] == "a"  # not <0x61>, which stands for the same byte
    assert spelled["Z"] == "<0x5A>"  # no piece of its own
    assert spelled["STOP"] == "STOP"
    assert "hello" not in spelled
    assert spelled["<|im_end|>"] == "<end_of_turn>"  # both end a turn
    assert spelled["<|endoftext|>"] == "</s>"  # both end the text
    assert "<|im_start|>" not in spelled


def test_special_and_ordinary_tokens_of_one_name_are_not_shared() -> None:
    """A text that spells ``<s>`` is not the token ``<s>``."""

    def tokenizer(special: bool) -> Tokenizer:
        backend = Backend(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
        backend.decoder = decoders.Fuse()
        if special:
            backend.add_special_tokens(["<s>"])
        else:
            backend.add_tokens(["c"])
        return Tokenizer(backend)

    one, other = tokenizer(True), tokenizer(False)
    translator = Translator(one, other)
    translator.is_identity = False  # the spellings agree; look at what the intersection says
    assert [ids.tolist() for ids in translator.shared] == [[1, 2], [1, 2]]


def test_the_same_tokenizer_twice_is_the_identity() -> None:
    """U71, U75: every id stands for itself, whatever kind the file declares and however many rows are padding."""
    metadata = byte_level_metadata()
    texts = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    padded = byte_level_metadata() | {
        "tokenizer.ggml.tokens": [*texts, "[PAD0]", "[PAD1]"],  # type: ignore[misc]
        "tokenizer.ggml.token_type": [*types, 5, 5],  # type: ignore[misc]
    }
    declared = byte_level_metadata() | {"tokenizer.ggml.pre": "llama-bpe"}
    one = byte_level()
    for other in (one, byte_level(), Tokenizer.from_gguf(padded), Tokenizer.from_gguf(declared)):
        translator = Translator(one, other)
        assert translator.is_identity
        assert [ids.tolist() for ids in translator.shared] == [list(range(one.vocab_size))] * 2
        encoding = RunningEncoding(translator)
        ids = [1, *one.encode("hello  world"), 2]
        encoding.extend(ids)
        assert encoding.tokens == ids
        assert encoding.pending == b""


@pytest.mark.parametrize("which", PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_growing_text_is_encoded_as_the_whole(which: str, text: str) -> None:
    """U73: one beginning-of-sequence token at most, double spaces kept, however the text arrives."""
    translator = pair(which)
    ids = translator.target.encode(text)
    expected = translator.draft.encode(text)
    for seed in range(4):
        encoding, source, start = RunningEncoding(translator), random.Random(seed), 0
        while start < len(ids):
            step = source.randint(1, 5)
            encoding.extend(ids[start : start + step])
            start += step
            if translator.to_draft.adds_bos:
                assert encoding.tokens.count(1) == 1
        assert encoding.tokens == expected
        assert translator.draft.decode(encoding.tokens) == text


@pytest.mark.parametrize("which", PAIRS)
def test_a_prefix_of_tokens_depends_on_nothing_else(which: str) -> None:
    """The encoding after n tokens is the same when asked for at every token and when asked for once."""
    translator = pair(which)
    ids = translator.target.encode("".join(TEXTS))
    stepwise = RunningEncoding(translator)
    for count, token in enumerate(ids, start=1):
        stepwise.extend([token])
        if count % 7 == 0:
            fresh = RunningEncoding(translator)
            fresh.extend(ids[:count])
            assert fresh.tokens == stepwise.tokens
            assert fresh.pending == stepwise.pending


def test_a_text_without_blanks_is_cut_too() -> None:
    """The open chunk stays bounded, so a step's cost does; the text is not changed by it."""
    translator = pair("bytes>gemma")
    encoding = RunningEncoding(translator)
    text = "你好" * 3000
    encoding.extend(translator.target.encode(text))
    assert len(encoding._text) <= 2048
    assert translator.draft.decode(encoding.tokens) == text


def test_special_tokens_become_their_counterparts_or_text() -> None:
    translator = pair("bytes>gemma")
    encoding = RunningEncoding(translator)
    encoding.extend(translator.target.encode("<|im_start|>the<|im_end|>"))
    draft = translator.draft
    assert encoding.tokens == [1, *draft.encode("<|im_start|>the", False), draft.backend.token_to_id("<end_of_turn>")]


def test_an_unfinished_character_waits_as_bytes() -> None:
    """Bytes of an emoji arrive one by one; a control token in the middle gives it up."""
    translator = pair("bytes>gemma")
    ids = translator.target.encode("x😀y")
    assert len(ids) == 6
    encoding = RunningEncoding(translator)
    waiting = []
    for token in ids:
        encoding.extend([token])
        waiting.append((encoding.pending, translator.draft.token_text(encoding.tokens[-1])))
    assert waiting[1:4] == [(b"\xf0", "<0xF0>"), (b"\xf0\x9f", "<0x9F>"), (b"\xf0\x9f\x98", "<0x98>")]
    assert waiting[-1] == (b"", "y")
    assert encoding.tokens == translator.draft.encode("x😀y")
    broken = RunningEncoding(translator)
    broken.extend([*ids[:3], 2, ids[0]])
    assert broken.pending == b""
    assert translator.draft.decode(broken.tokens) == "x\ufffdx"


@pytest.mark.parametrize("which", PAIRS)
def test_continuations_keep_their_spaces(which: str) -> None:
    """What follows a text is not read as its beginning: no token, and no blank, is put in front."""
    translator = pair(which)
    for encoder in (translator.to_target, translator.to_draft):
        for text in (" the", "the", "  the  in", "\nthe", "e", " "):
            data = b"".join(map(encoder.tokenizer.token_bytes, encoder.encode(text)))
            assert data.decode() == text
        assert encoder.encode("") == []


@pytest.mark.parametrize("which", ["bytes>gemma", "gemma>bytes", "pieces>bytes"])
def test_the_rest_of_a_character(which: str) -> None:
    encoder = pair(which).to_target
    whole = "😀 the".encode()
    for cut in range(1, 4):
        ids = encoder.encode_after(whole[:cut], whole[cut:])
        assert b"".join(map(encoder.tokenizer.token_bytes, ids)) == whole[cut:]
    assert encoder.encode_after(b"", whole[:2]) == []  # no whole character yet
    half = encoder.encode_after(whole[:1], whole[1:2])
    assert half == encoder.encode_bytes(whole[1:2])
