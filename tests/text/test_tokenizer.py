"""GGUF tokenizers, chat templates, end ids, vocabulary identity."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import byte_level_metadata, sentencepiece_metadata

from outrider.errors import InvalidOptionError, ModelFileError, UnsupportedModelError
from outrider.text.gguf_tokenizer import PRE_TOKENIZERS
from outrider.text.tokenizer import Tokenizer
from outrider.text.vocabulary import explain_difference, same_vocabulary

HARD = [
    "hello  world",
    "12345",
    "你好，世界",
    "😀👩‍👩‍👧‍👦🇩🇪",
    "e\u0301 é",
    "def f():\n\n\n\treturn  1",
    " lead",
    "trail  ",
    "\u00a0\u3000",
]


@pytest.mark.parametrize("text", HARD)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud83d", "caf\udce9"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidOptionError, match="not valid Unicode"):
        tokenizer.encode(text)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_round_trips(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    assert tokenizer.decode(tokenizer.encode("hello it's  12345\n\n x", False)) == "hello it's  12345\n\n x"


def test_pre_tokenizers_split_digits_as_published() -> None:
    def pieces(pre: str) -> list[str]:
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
        return [tokenizer.token_text(i) for i in tokenizer.encode("1212", False)]

    assert pieces("smollm") == ["1", "2", "1", "2"]  # the merge "1 2" never applies to single digits
    assert pieces("gpt-2") == ["12", "12"]
    assert pieces("llama-bpe") == ["12", "1", "2"]  # groups of three
    assert pieces("qwen2") == ["1", "2", "1", "2"]


def test_unknown_pre_tokenizer_and_family_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'falcon9'"):
        Tokenizer.from_gguf(byte_level_metadata("falcon9"))
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        Tokenizer.from_gguf({**byte_level_metadata(), "tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.tokens": []},
        {"tokenizer.ggml.token_type": [1, 2]},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.merges": ["never seen"]},
        {"tokenizer.ggml.eos_token_id": 10**6},
    ],
)
def test_damaged_metadata_is_a_model_file_error(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_gguf({**byte_level_metadata(), **change})


def test_sentencepiece_merges_by_score_and_adds_bos() -> None:
    made = Tokenizer.from_gguf(sentencepiece_metadata())
    assert [made.token_text(i) for i in made.encode("the 你好")] == ["<s>", "▁the", "▁", "你好"]
    assert [made.token_text(i) for i in made.encode("ü", False)] == ["▁", "<0xC3>", "<0xBC>"]
    plain = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert [plain.token_text(i) for i in plain.encode("in\n\n\nin", False)] == ["in", "\n\n", "\n", "in"]


def test_end_ids_include_known_end_of_turn_tokens(byte_level: Tokenizer) -> None:
    assert {byte_level.token_text(i) for i in byte_level.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    sentencepiece = Tokenizer.from_gguf(sentencepiece_metadata())
    assert {sentencepiece.token_text(i) for i in sentencepiece.eos_ids} == {"</s>", "<end_of_turn>"}


def test_chat_template_writes_specials_as_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.apply_chat_template([{"role": "user", "content": "hello"}])
    assert byte_level.decode(ids, False) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (ids.count(1), ids.count(2)) == (2, 1)  # one token each, and no second BOS
    assert byte_level.decode(ids) == "user\nhello\nassistant\n"


def test_chat_template_mistakes_are_usage_errors() -> None:
    without = Tokenizer.from_gguf(byte_level_metadata(chat_template=None))
    with pytest.raises(InvalidOptionError, match="no chat template"):
        without.apply_chat_template([{"role": "user", "content": "x"}])
    refusing = Tokenizer.from_gguf(byte_level_metadata(chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidOptionError, match="roles must alternate"):
        refusing.apply_chat_template([{"role": "user", "content": "x"}])
    escaping = Tokenizer.from_gguf(byte_level_metadata(chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(InvalidOptionError):
        escaping.apply_chat_template([{"role": "user", "content": "x"}])


def test_ids_without_text(byte_level: Tokenizer) -> None:
    beyond = byte_level.vocab_size + 5
    assert byte_level.token_text(beyond) == f"<id {beyond}>"
    assert byte_level.decode([beyond]) == ""
    assert byte_level.vocab_size == len(byte_level.vocabulary())


def test_same_vocabulary_ignores_padding_and_a_longer_tail() -> None:
    base, padded, changed = byte_level_metadata(), byte_level_metadata(), byte_level_metadata()
    tokens = list(base["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    padded["tokenizer.ggml.tokens"] = [*tokens, "[PAD270]", "[PAD271]"]
    padded["tokenizer.ggml.token_type"] = [*base["tokenizer.ggml.token_type"], 5, 5]  # type: ignore[misc]
    changed["tokenizer.ggml.tokens"] = ["<|other|>", *tokens[1:]]
    first, longer, other = (Tokenizer.from_gguf(m) for m in (base, padded, changed))
    assert same_vocabulary(first, longer)
    assert same_vocabulary(longer, first)
    assert not same_vocabulary(first, other)
    reason = explain_difference(first, other)
    assert "'<|endoftext|>'" in str(reason)
    assert "'<|other|>'" in str(reason)
    assert first.fingerprint() != other.fingerprint()
    assert first.fingerprint() == Tokenizer.from_gguf(base).fingerprint()


def test_from_directory(byte_level: Tokenizer, tmp_path: Path) -> None:
    byte_level.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded.encode("hello 12 你") == byte_level.encode("hello 12 你")
    assert (loaded.eos_ids, loaded.bos_id) == ({0, 2, 7}, 1)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        Tokenizer.from_directory(tmp_path / "missing")
