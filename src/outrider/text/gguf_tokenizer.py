"""Builds a ``tokenizers.Tokenizer`` from the metadata of a GGUF file.

Two families: byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``: SmolLM, Llama 3, Qwen 2, GPT-2) and SentencePiece
BPE with byte fallback (``llama``: Llama 1/2, Mistral, Gemma). Splitting rules follow the published Hugging Face
tokenizers of those families. An unknown family or pre-tokenizer is refused: a wrong split would change the prompt
silently. Knows nothing of chat templates or stop tokens (``tokenizer.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.errors import ModelFileError, UnsupportedModelError

Metadata = Mapping[str, object]

SPACE = "\u2581"  # SentencePiece's visible space


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_SMOLLM_NAMES = ("smollm",)
_GPT2_NAMES = ("gpt-2", "gpt2", "default")
PRE_TOKENIZERS = (*_SMOLLM_NAMES, *_LLAMA3_NAMES, *_QWEN2_NAMES, *_GPT2_NAMES)
"""Names of ``tokenizer.ggml.pre`` that can be rebuilt exactly."""


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The fast tokenizer that the metadata describes, with its special tokens and beginning-of-sequence rule.

    Args:
        metadata: GGUF key -> plain Python value (lists for arrays).

    Raises:
        ModelFileError: when the vocabulary is missing or inconsistent.
        UnsupportedModelError: when the tokenizer family or its pre-tokenizer is unknown.
    """
    family = metadata.get("tokenizer.ggml.model")
    if family == "gpt2":
        tokenizer = _byte_level_bpe(metadata)
    elif family == "llama":
        tokenizer = _sentencepiece_bpe(metadata)
    else:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is of kind {family!r}, which cannot be rebuilt exactly; known kinds are 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece). Use the model's Hugging Face directory instead"
        )
    _add_special_tokens(tokenizer, metadata)
    _add_boundaries(tokenizer, metadata, family)
    return tokenizer


def token_texts(metadata: Metadata) -> list[str]:
    """The vocabulary in id order, as stored.

    Raises:
        ModelFileError: when it is missing.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not tokens:
        raise ModelFileError("the GGUF file has no vocabulary (tokenizer.ggml.tokens); it holds weights only")
    return list(cast("Sequence[str]", tokens))


def token_types(metadata: Metadata) -> list[int]:
    """One ``TokenType`` a token; all normal when the file does not say.

    Raises:
        ModelFileError: when their number differs from the vocabulary's.
    """
    count = len(token_texts(metadata))
    types = cast("Sequence[int] | None", metadata.get("tokenizer.ggml.token_type"))
    if types is None:
        return [TokenType.NORMAL] * count
    if len(types) != count:
        raise ModelFileError(f"the GGUF file has {count} tokens but {len(types)} token types; the file is damaged")
    return [int(kind) for kind in types]


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    texts = token_texts(metadata)
    vocabulary = {text: index for index, text in enumerate(texts)}
    if len(vocabulary) != len(texts):
        doubled = next(text for index, text in enumerate(texts) if vocabulary[text] != index)
        raise ModelFileError(f"the GGUF file lists the token {doubled!r} twice; the file is damaged")
    return vocabulary


def _byte_level_bpe(metadata: Metadata) -> Tokenizer:
    merges = cast("Sequence[str] | None", metadata.get("tokenizer.ggml.merges"))
    if merges is None:
        raise ModelFileError("the GGUF file has no merges (tokenizer.ggml.merges), which byte-level BPE needs")
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    # A merge is "left right"; neither side holds a plain space, but a side may begin with one in odd files.
    pairs = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in merges]
    try:
        model = models.BPE(vocab=_vocabulary(metadata), merges=pairs, ignore_merges=name in _LLAMA3_NAMES)
    except Exception as error:  # tokenizers raises bare Exception for a merge of unknown tokens
        raise ModelFileError(f"the GGUF file's merges do not fit its vocabulary: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    if name in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SMOLLM_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    pattern = {**dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_SPLIT), **dict.fromkeys(_QWEN2_NAMES, _QWEN2_SPLIT)}.get(name)
    if pattern is None:
        raise UnsupportedModelError(
            f"the GGUF file's pre-tokenizer '{name}' is not known, and guessing it would change the prompt silently; "
            f"known ones: {', '.join(sorted(PRE_TOKENIZERS))}. Use the model's Hugging Face directory instead"
        )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    vocabulary = _vocabulary(metadata)
    texts = token_texts(metadata)
    unknown = cast("int | None", metadata.get("tokenizer.ggml.unknown_token_id"))
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(metadata, vocabulary),
        unk_token=None if unknown is None else texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merge rules that reproduce SentencePiece's order: the pair whose union has the best score goes first.

    SentencePiece joins any two neighbours whose union is a normal piece, so every split of a piece is a rule.
    """
    scores = cast("Sequence[float] | None", metadata.get("tokenizer.ggml.scores"))
    if scores is None or len(scores) != len(vocabulary):
        raise ModelFileError("the GGUF file lacks the scores (tokenizer.ggml.scores) of its SentencePiece vocabulary")
    normal = {
        text: scores[index]
        for (text, index), kind in zip(vocabulary.items(), token_types(metadata), strict=True)
        if kind == TokenType.NORMAL
    }
    # Single characters may be user-defined (Gemma's newline), and are then matched before any merge.
    rules: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, score in normal.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                rules.append((-score, vocabulary[left], vocabulary[right], (left, right)))
    rules.sort()
    return [rule[3] for rule in rules]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    control, user_defined = [], []
    for text, kind in zip(token_texts(metadata), token_types(metadata), strict=True):
        if kind == TokenType.CONTROL and text:
            control.append(AddedToken(text, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED and text:
            user_defined.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _add_boundaries(tokenizer: Tokenizer, metadata: Metadata, family: str) -> None:
    """Make ``encode(add_special_tokens=True)`` add the tokens that the file asks for."""
    texts = token_texts(metadata)
    default_bos = family == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    before = _boundary(metadata, "bos", default_bos)
    after = _boundary(metadata, "eos", False)
    if not before and not after:
        return
    pieces = [texts[i] for i in before] + ["$A"] + [texts[i] for i in after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=[(texts[i], i) for i in {*before, *after}]
    )


def _boundary(metadata: Metadata, which: str, default: bool) -> list[int]:
    index = metadata.get(f"tokenizer.ggml.{which}_token_id")
    wanted = bool(metadata.get(f"tokenizer.ggml.add_{which}_token", default))
    return [int(cast("int", index))] if wanted and index is not None else []
