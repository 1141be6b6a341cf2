"""Stop strings over token and step borders; streamed text never shows the beginning of one."""

from __future__ import annotations

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.text.stop import StopStrings
from outrider.text.tokenizer import Tokenizer

TOKENIZERS = {"byte_level": tiny_tokenizers.byte_level(), "sentencepiece": tiny_tokenizers.sentencepiece()}
NAMES = st.sampled_from(sorted(TOKENIZERS))
TEXTS = st.text(alphabet="abST你😀 ", max_size=14)
STOPS = st.lists(st.text(alphabet="abST你😀 ", min_size=1, max_size=4), max_size=3)


def first_hit(tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int = 0) -> int | None:
    """The slow obvious way: decode every prefix. The text of an unfinished character counts as absent."""
    floor = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        ends = [e for s in stops for e in range(floor + 1, len(text) + 1) if text[:e].endswith(s)]
        if count < min_tokens:
            floor = len(text)
        elif ends:
            return count
    return None


@given(NAMES, TEXTS, STOPS, st.integers(0, 5), st.lists(st.integers(1, 4), max_size=20))
@settings(deadline=None, max_examples=300)
def test_the_earliest_token_wins_for_any_split(
    name: str, text: str, stops: list[str], min_tokens: int, sizes: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, False)
    state = StopStrings(tokenizer, stops)
    found, start = None, 0
    for size in [*sizes, *[1] * len(ids)]:
        end = start + size
        while found is None and (hit := state.push(ids[start:end])) is not None:
            start += hit
            found = start if start >= min_tokens else None  # else ignored, and the rest of the step is pushed
        start = end
    assert found == first_hit(tokenizer, ids, stops, min_tokens)


@given(st.text(alphabet="abST ", max_size=20), STOPS)
def test_streamed_text_is_a_prefix_of_the_trimmed_text(text: str, stops: list[str]) -> None:
    state = StopStrings(TOKENIZERS["byte_level"], stops)
    final = state.trim(text)
    for length in range(len(text) + 1):
        if len(final) < len(text) and any(s in text[:length] for s in stops):
            break
        shown = text[: state.safe_length(text[:length])]
        assert final.startswith(shown)
    assert not any(s in final for s in stops)


def test_stop_string_over_tokens_and_steps() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    state = StopStrings(tokenizer, ["lo w"])
    ids = tokenizer.encode("hello world")
    assert [tokenizer.token_text(i) for i in ids[:2]] == ["hello", "Ġw"]
    assert state.push(ids[:1]) is None
    assert state.push(ids[1:]) == 1
    assert state.trim("hello w") == "hel"
    assert state.safe_length("hello") == 3


def test_the_string_complete_first_wins() -> None:
    state = StopStrings(TOKENIZERS["byte_level"], ["hello", "ell"])
    assert state.trim("hello") == "h"


def test_a_special_token_is_matched_by_id_though_it_has_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    state = StopStrings(tokenizer, ["<|im_start|>"])
    assert state.push(tokenizer.encode("a<|im_start|>b")) == 2


def test_a_hit_that_was_not_acted_on_no_longer_counts() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("abaaab")
    state = StopStrings(tokenizer, ["ab"])
    assert state.push(ids) == 2
    assert state.safe_length("ab") == 0
    assert state.push(ids[2:]) == 4
    assert state.safe_length("abaaa") == 4
    assert state.trim("abaaab") == "abaa"


@pytest.mark.parametrize("strings", [[], ["zz"]])
def test_nothing_found(strings: list[str]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    state = StopStrings(tokenizer, strings)
    assert state.push(tokenizer.encode("hello")) is None
    assert state.trim("hello") == "hello"
    assert state.safe_length("hello") == 5
