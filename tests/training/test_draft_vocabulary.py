"""Which tokens a head can guess: frequent answer tokens, and those that must always be there."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from outrider.errors import InvalidOptionError
from outrider.text.tokenizer import Tokenizer
from outrider.training.draft_vocabulary import choose_draft_ids, coverage


def tokenizer_of(words: list[str], special: list[str]) -> Tokenizer:
    """Ids in the order of ``words``; the last ones are the special ones, the first of these ends an answer."""
    vocabulary = {word: index for index, word in enumerate([*words, *special])}
    backend = Backend(models.WordLevel(vocabulary, unk_token=words[0]))
    backend.add_special_tokens(special)
    return Tokenizer(backend, eos_ids=[len(words)])


WORDS = [f"word{n}" for n in range(88)]
SINGLE = [*"0123456789", "\n", "x"]
SPECIAL = ["<end>", "<user>"]
TOKENIZER = tokenizer_of([*WORDS, *SINGLE], SPECIAL)
VOCABULARY = 102


def counted(**words: int) -> torch.Tensor:
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    for word, count in words.items():
        counts[int(word.removeprefix("word"))] = count
    return counts


def test_the_most_frequent_tokens_and_the_necessary_ones() -> None:
    ids = choose_draft_ids(counted(word80=5, word7=9, word3=1), 30, TOKENIZER)
    assert ids is not None
    assert ids.dtype == torch.int64
    necessary = set(range(88, 100)) | {100, 101}
    unused = [n for n in range(88) if n not in (80, 7, 3)]
    assert ids.tolist() == sorted(necessary | {80, 7, 3} | set(unused[: 30 - len(necessary) - 3]))


def test_single_bytes_go_first_when_there_is_little_room() -> None:
    ids = choose_draft_ids(counted(word80=5, word7=9, word3=1), 26, TOKENIZER)
    assert ids is not None
    assert 99 not in ids  # the byte x; digits, newline and specials are 13 of 26
    assert set(range(88, 99)) | {100, 101, 80, 7, 3} <= set(ids.tolist())


def test_end_tokens_are_in_even_the_smallest_one() -> None:
    ids = choose_draft_ids(counted(word80=5, word7=9), 2, TOKENIZER)
    assert ids is not None
    assert ids.tolist() == [7, 100]
    with pytest.raises(InvalidOptionError, match="no room"):
        choose_draft_ids(counted(), 0, TOKENIZER)


def test_equal_counts_are_broken_by_id() -> None:
    ids = choose_draft_ids(counted(word60=2, word50=2, word40=2), 3, TOKENIZER)
    assert ids is not None
    assert ids.tolist() == [40, 50, 100]


def test_padding_rows_of_the_target_can_fill_up() -> None:
    counts = torch.zeros(VOCABULARY + 20, dtype=torch.int64)
    ids = choose_draft_ids(counts, VOCABULARY + 10, TOKENIZER)
    assert ids is not None
    assert ids.tolist() == list(range(VOCABULARY + 10))


@pytest.mark.parametrize("size", [VOCABULARY, VOCABULARY + 1])
def test_the_whole_vocabulary_has_no_map(size: int) -> None:
    assert choose_draft_ids(counted(), size, TOKENIZER) is None


def test_coverage() -> None:
    counts = counted(word1=3, word2=1)
    assert coverage(counts, torch.tensor([1])) == 0.75
    assert coverage(counts, None) == 1.0
    assert math.isnan(coverage(counted(), torch.tensor([1])))
