"""Building a datastore for ``--drafter datastore``: text files -> tokens of a model -> suffix array -> file.

Only the model's tokenizer is read, never its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.drafters.datastore_file import open_store, save_store, store_path
from outrider.drafters.datastore_index import StoreHeader, build_store
from outrider.engine.loading import TOYS, Progress
from outrider.errors import InvalidOptionError, ModelFileError, RunError
from outrider.models.load import open_checkpoint, resolve
from outrider.text.tokenizer import Tokenizer
from outrider.text.toy_tokenizer import toy_tokenizer
from outrider.text.vocabulary import vocabulary_hash

_PIECE = 1 << 20
"""Characters tokenised at once, cut at the end of a line."""


@dataclass(frozen=True, slots=True)
class BuiltStore:
    """What ``build_datastore`` wrote; ``is_cut`` when ``max_tokens`` left text out."""

    path: Path
    documents: int
    tokens: int
    is_cut: bool


def build_datastore(
    files: Sequence[Path], model: str, output: Path, max_tokens: int, progress: Progress | None = None
) -> BuiltStore:
    """Tokenise ``files``, one document each, and write a store; nothing is left behind when it fails.

    Args:
        files: UTF-8 text files.
        model: whose tokenizer (catalogue name, directory, .gguf file or hub id).
        output: the file, or an existing directory to put it in.
        max_tokens: tokens kept at most; what comes later is left out.
        progress: told (stage, done, total).

    Raises:
        InvalidOptionError: a file that is no UTF-8 text, an output in no directory or that exists and is no store,
            no text at all.
        RunError: the output cannot be written.
        UsageError, RunError: as ``models/load.py`` says of ``model``.
    """
    report = progress or _silent
    path = store_path(output)
    if not path.parent.is_dir():
        raise InvalidOptionError(f"cannot write '{path}': there is no directory '{path.parent}'")
    _refuse_to_overwrite(path)
    texts = [_read(file) for file in files]
    tokenizer = load_tokenizer(model, progress)
    documents, is_cut = _tokenise(texts, tokenizer, max_tokens, report)
    header = StoreHeader(tokenizer.vocab_size, vocabulary_hash(tokenizer), model, tuple(map(str, files)))
    store = build_store(header, documents, lambda done, total: report("sort", done, total))
    report("write", 0, 1)
    try:
        save_store(store, path)
    except OSError as error:
        raise RunError(
            f"cannot write '{path}': {error.strerror or error}; free space or choose another --output"
        ) from None
    report("write", 1, 1)
    return BuiltStore(path, sum(map(bool, documents)), sum(map(len, documents)), is_cut)


def load_tokenizer(model: str, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of what a user names as a model.

    Raises:
        UsageError, RunError: as ``models/load.py`` says.
    """
    if model in TOYS:
        return toy_tokenizer()
    location = resolve(model, progress)
    if location.kind == "gguf":
        return Tokenizer.from_gguf(getattr(open_checkpoint(location), "metadata", {}))
    return Tokenizer.from_directory(location.path)


def _refuse_to_overwrite(path: Path) -> None:
    """A store may be built again; anything else, the user's own texts above all, stays."""
    if not path.is_file():
        return
    try:
        open_store(path)
    except ModelFileError:  # a damaged store
        return
    except InvalidOptionError:
        raise InvalidOptionError(
            f"'{path}' exists and is not a datastore; choose another --output, or remove it first"
        ) from None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidOptionError(f"'{file}' is not UTF-8 text; convert it or leave it out") from None
    except IsADirectoryError:
        raise InvalidOptionError(f"'{file}' is a directory; give its files, for example {file}/*.txt") from None
    except OSError as error:
        raise InvalidOptionError(f"cannot read '{file}': {error.strerror or error}") from None


def _tokenise(
    texts: Sequence[str], tokenizer: Tokenizer, max_tokens: int, report: Progress
) -> tuple[list[list[int]], bool]:
    """Token ids of every text, and whether ``max_tokens`` cut them."""
    documents: list[list[int]] = []
    room, done, total = max_tokens, 0, sum(map(len, texts))
    for text in texts:
        document: list[int] = []
        for piece in _pieces(text):
            if room <= 0:
                return [*documents, document], True
            report("tokenise", done, total)
            ids = tokenizer.encode(piece, add_special_tokens=False)
            document += ids[:room]
            room -= len(ids)
            done += len(piece)
        documents.append(document)
    return documents, room < 0


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def _silent(stage: str, done: int, total: int) -> None:
    """The progress callback of a caller that wants none."""
