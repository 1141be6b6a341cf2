"""``outrider datastore build`` with the toy tokenizer: what it writes, prints and refuses, and drafting from it."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from outrider.cli import app
from outrider.drafters.datastore_file import open_store
from outrider.engine import datastore
from outrider.text.toy_tokenizer import toy_tokenizer
from outrider.text.vocabulary import vocabulary_hash


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Two small files."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 3)
    (tmp_path / "b.txt").write_text("the dog ran")
    return [str(tmp_path / name) for name in ("a.txt", "b.txt")]


def build(*arguments: str) -> int:
    return app.run(["datastore", "build", *arguments, "--model", "toy"])


def test_build_writes_a_store_that_drafts(texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, letters = tmp_path / "my.store", tmp_path / "letters.txt"
    letters.write_text(string.ascii_letters)  # whatever the toy says, something follows it
    assert build(*texts, str(letters), "--output", str(output)) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}: 3 documents, 132 tokens\n"
    assert f"--model toy --drafter datastore:{output}" in captured.err
    store, tokenizer = open_store(output), toy_tokenizer()
    assert store.header.sources == (*texts, str(letters))
    assert store.header.model == "toy"
    assert store.header.vocab_size == 65
    assert store.header.vocabulary == vocabulary_hash(tokenizer)
    parts = "".join("|" if token < 0 else tokenizer.decode([token]) for token in store.tokens.tolist()).split("|")
    assert parts == ["the cat sat on the mat\n" * 3, "the dog ran", string.ascii_letters, ""]
    drafter = f"datastore:{output},min_match=1"
    arguments = ["generate", "on the ", "--raw", "--model", "toy", "--drafter", drafter, "-n", "12", "--ignore-eos"]
    assert app.run([*arguments, "--json", "--compare"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "identical" in found["comparison"]
    assert found["stats"]["num_draft_tokens"] > 0


def test_output_into_a_directory(texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(*texts, "-o", str(tmp_path)) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'datastore.safetensors'}: 2 documents")
    assert app.run(["generate", "a", "--model", "toy", "--drafter", f"datastore:{tmp_path}", "-n", "3"]) == 0


def test_long_texts_are_tokenised_in_pieces(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datastore, "_PIECE", 5)
    assert build(*texts, "-o", str(tmp_path)) == 0
    assert "2 documents, 80 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("most", "documents"), [(30, 1), (69, 1), (70, 2), (79, 2)])
def test_max_tokens_cuts_and_says_so(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int, documents: int
) -> None:
    assert build(*texts, "-o", str(tmp_path), "--max-tokens", str(most)) == 0
    captured = capsys.readouterr()
    assert f": {documents} documents, {most} tokens" in captured.out
    assert f"more than {most} tokens" in captured.err


def test_nothing_is_said_of_a_limit_that_is_not_reached(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(*texts, "-o", str(tmp_path), "--max-tokens", "80") == 0
    assert "more than" not in capsys.readouterr().err


def test_refusals_are_one_line_and_leave_nothing(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    output = tmp_path / "my.store"
    cases = [
        ([str(tmp_path / "latin.txt")], "latin.txt' is not UTF-8 text"),
        ([str(tmp_path / "empty.txt")], "no text to build a datastore of"),
        ([str(tmp_path)], "is a directory; give its files"),
        ([str(tmp_path / "missing.txt")], "missing.txt': No such file"),
    ]
    for files, words in cases:
        assert build(*texts[:1] * (files != cases[1][0]), *files, "-o", str(output)) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert words in error
    assert build(*texts, "-o", str(tmp_path / "no" / "my.store")) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "empty.txt", "latin.txt"]


def test_a_file_that_is_no_store_is_not_overwritten(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own notes above all: ``build notes.txt --output notes.txt``."""
    before = Path(texts[0]).read_bytes()
    assert build(*texts, "--output", texts[0]) == 2
    assert "exists and is not a datastore" in capsys.readouterr().err
    assert Path(texts[0]).read_bytes() == before
    store = tmp_path / "my.store"
    assert build(texts[0], "--output", str(store)) == 0
    assert build(*texts, "--output", str(store)) == 0  # a store may be built again
    assert len(open_store(store).header.sources) == 2
    store.write_bytes(store.read_bytes()[:-5])  # a damaged one too
    assert build(texts[0], "--output", str(store)) == 0


def test_a_disk_that_refuses_is_a_run_error(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datastore, "save_store", full)
    assert build(*texts, "-o", str(tmp_path / "x")) == 1
    assert "cannot write" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(datastore, "build_store", interrupted)
    assert build(*texts, "-o", str(tmp_path / "x")) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["datastore", "--help"], ["datastore", "build", "--help"]):
        assert app.run(arguments) == 0
        assert "Example: outrider datastore" in capsys.readouterr().out
