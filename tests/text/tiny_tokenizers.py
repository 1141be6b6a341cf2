"""Small tokenizers built from made-up GGUF metadata: byte-level BPE and SentencePiece with byte fallback."""

from __future__ import annotations

from tokenizers import pre_tokenizers

from outrider.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_metadata(pre: str = "smollm", chat_template: str | None = TEMPLATE) -> dict[str, object]:
    """256 bytes, three specials and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "S T", "ST O", "STO P"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    return metadata


def sentencepiece_metadata(add_space_prefix: bool = True) -> dict[str, object]:
    """Byte fallback, a few pieces with scores; without the space prefix (as Gemma) newline runs are user-defined."""
    special = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    user = ["<i>", "<u>", "<b>"] if add_space_prefix else ["\n", "\n\n", "<b>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    merged = ["▁t", "he", "▁the", "in", "▁in", "你好"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,", "你", "好", "é", "STOP"]
    tokens = [*special, *user, *fallback, *merged, *letters]
    scores = [-1000.0] * 7 + [0.0] * 256 + [-float(i) for i in range(len(merged) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 4, 4, 4] + [6] * 256 + [1] * (len(merged) + len(letters)),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


def sentencepiece(add_space_prefix: bool = True) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix))
