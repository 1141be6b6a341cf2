"""The suffix array against sorting by hand, lookups against a slow search, and the file: whole, atomic, checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters import datastore_file
from outrider.drafters.datastore_file import open_store, save_store, store_path
from outrider.drafters.datastore_index import SEPARATOR, SORTED, StoreHeader, TokenStore, build_store, sort_suffixes
from outrider.errors import InvalidOptionError, ModelFileError

HEADER = StoreHeader(12, "abc", "toy", ("one.txt", "two.txt"))
documents = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=5).filter(any)


@settings(max_examples=200, deadline=None)
@given(documents)
def test_suffixes_are_sorted(texts: list[list[int]]) -> None:
    tokens = build_store(HEADER, texts).tokens.tolist()
    assert tokens == [token for text in texts if text for token in [*text, SEPARATOR]]
    expected = sorted(range(len(tokens)), key=lambda start: tokens[start:])
    assert sort_suffixes(np.asarray(tokens, dtype=np.int32)).tolist() == expected


def test_endless_repetition_is_sorted_as_far_as_it_is_looked_at() -> None:
    tokens = np.full(1000, 7, dtype=np.int32)
    order = sort_suffixes(tokens)
    assert sorted(order.tolist()) == list(range(1000))
    assert order[: SORTED - 1].tolist() == list(range(999, 1000 - SORTED, -1))
    # Alike in all that is looked at: in the order of the text.
    assert order[SORTED - 1 :].tolist() == list(range(1001 - SORTED))


def test_sorting_reports_its_rounds() -> None:
    seen: list[tuple[int, int]] = []
    sort_suffixes(np.asarray([3, 1, 2], dtype=np.int32), lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(6)]


def slow_matches(tokens: list[int], text: list[int], shortest: int, longest: int) -> tuple[int, list[int]]:
    for length in range(min(longest, len(text)), shortest - 1, -1):
        found = [i + length for i in range(len(tokens)) if tokens[i : i + length] == text[-length:]]
        if found:
            return length, found
    return 0, []


@settings(max_examples=300, deadline=None)
@given(documents, st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 5))
def test_lookups_find_what_a_slow_search_finds(
    texts: list[list[int]], text: list[int], shortest: int, more: int
) -> None:
    store = build_store(HEADER, texts)
    length, positions = store.matches(text, shortest, shortest + more, 10_000)
    expected = slow_matches(store.tokens.tolist(), text, shortest, shortest + more)
    assert (length, sorted(positions.tolist())) == expected


def test_of_many_occurrences_each_continuation_keeps_its_share() -> None:
    store = build_store(HEADER, [[1, 2, 5]] * 300 + [[1, 2, 6]] * 100)
    length, positions = store.matches([1, 2], 2, 16, 40)
    following = store.tokens[positions].tolist()
    assert length == 2
    assert len(following) == 40
    assert following.count(5) == 30


def test_no_match_across_documents() -> None:
    store = build_store(HEADER, [[1, 2], [3, 4]])
    assert store.matches([2, 3], 2, 16, 10)[0] == 0
    length, positions = store.matches([1, 2], 2, 16, 10)
    assert (length, store.tokens[positions].tolist()) == (2, [SEPARATOR])


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = build_store(HEADER, [[1, 2, 3], [], [4, 5, 11]])
    save_store(store, tmp_path / "a.store")
    found = open_store(store_path(tmp_path / "a.store"))
    assert found.header == HEADER
    assert found.tokens.tolist() == store.tokens.tolist()
    assert found.suffixes.tolist() == store.suffixes.tolist()
    base = found.tokens.base
    assert isinstance(base, np.memmap), "the store is mapped, not copied"
    assert [path.name for path in tmp_path.iterdir()] == ["a.store"]
    assert store_path(tmp_path) == tmp_path / "datastore.safetensors"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "a.store"
    save_store(build_store(HEADER, [[1]]), path)
    before = path.read_bytes()

    def interrupted(tensors: object, partial: Path, metadata: object) -> None:
        partial.write_bytes(b"half")
        raise error

    monkeypatch.setattr(datastore_file, "save_file", interrupted)
    with pytest.raises(error):
        save_store(build_store(HEADER, [[2]]), path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["a.store"]


def test_nothing_to_store() -> None:
    with pytest.raises(InvalidOptionError, match="no text"):
        build_store(HEADER, [[], []])


def changed(path: Path, **metadata: object) -> None:
    """Rewrite the header's metadata."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] |= metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    with pytest.raises(InvalidOptionError, match=r"no datastore at .*; build one: outrider datastore build"):
        open_store(path)
    for content in (b"", b"some text that somebody wrote", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"):
        path.write_bytes(content)
        with pytest.raises(InvalidOptionError, match="is not a datastore of this version"):
            open_store(path)
    save_store(build_store(HEADER, [[1, 2]]), path)
    changed(path, format="outrider datastore 0")
    with pytest.raises(InvalidOptionError, match="is not a datastore of this version"):
        open_store(path)


def test_damage_is_found_when_the_store_is_opened(tmp_path: Path) -> None:
    path, good = tmp_path / "a.store", build_store(HEADER, [[1, 2, 3]])
    save_store(good, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="is damaged: it ends after"):
        open_store(path)
    for tokens, suffixes in [
        (good.tokens, good.suffixes + 1),
        (good.tokens, good.suffixes - 1),
        (good.tokens[:-1], good.suffixes),
        (good.tokens[:-1], good.suffixes[good.suffixes < 3]),
        (good.tokens - 1, good.suffixes),
        (good.tokens.astype(np.int64), good.suffixes),
    ]:
        save_store(TokenStore(HEADER, tokens, suffixes), path)
        with pytest.raises(ModelFileError, match="is damaged"):
            open_store(path)
    save_store(good, path)
    changed(path, sources="not a list")
    with pytest.raises(ModelFileError, match="its header makes no sense"):
        open_store(path)
