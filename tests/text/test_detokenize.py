"""Deltas add up to the full decode, whatever the tokens and the split, at linear cost."""

from __future__ import annotations

from typing import cast

import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.text.detokenize import IncrementalDetokenizer
from outrider.text.tokenizer import Tokenizer

TOKENIZERS = {
    "byte_level": tiny_tokenizers.byte_level(),
    "sentencepiece": tiny_tokenizers.sentencepiece(),
    "no_prefix": tiny_tokenizers.sentencepiece(False),
}
TEXTS = st.text(alphabet="the hello12 \n你好é\u0301😀👩\u200d👧🇩🇪STOP▁", max_size=30)
NAMES = st.sampled_from(sorted(TOKENIZERS))


def deltas(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, start = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    pending = detokenizer.pending()
    assert detokenizer.flush() == pending
    return [*pieces, pending]


@given(NAMES, TEXTS, st.lists(st.integers(0, 4), max_size=20))
@settings(deadline=None)
def test_text_split_anywhere(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    pieces = deltas(tokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


@given(NAMES, st.data(), st.lists(st.integers(0, 4), max_size=20), st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_tokens_at_all(name: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))  # broken bytes, specials, padding
    assert "".join(deltas(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


def test_a_character_appears_once_and_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    assert deltas(tokenizer, ids, [1, 1, 1, 1, 1]) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert deltas(tokenizer, tokenizer.encode("a😀")[:-1], [1, 1, 1]) == ["a", "", "", "", "\ufffd"]


def test_sentencepiece_space_is_kept_inside_and_dropped_in_front() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert deltas(tokenizer, tokenizer.encode("the in the", False), [1, 1, 1]) == ["the", " in", " the", "", ""]


class CountingTokenizer(Tokenizer):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        ids = cast("list[int]", ids)
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


def test_cost_is_linear_in_the_number_of_tokens() -> None:
    counting = CountingTokenizer(TOKENIZERS["sentencepiece"].backend)
    ids = counting.encode("the in ü " * 300, False)
    deltas(counting, ids, [1] * len(ids))
    assert counting.decoded < 4 * len(ids)
