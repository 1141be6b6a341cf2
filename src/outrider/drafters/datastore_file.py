"""A ``TokenStore`` as a file, in safetensors format.

``tokens`` int32 [n], ``suffixes`` int64 [n], and metadata that name the tokenizer and the sources. The file is written
under another name and renamed when it is complete, and mapped into memory when it is read.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from outrider.drafters.datastore_index import SEPARATOR, StoreHeader, TokenStore
from outrider.errors import InvalidOptionError, ModelFileError

FILE_NAME = "datastore.safetensors"
_FORMAT = "outrider datastore 1"
_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "tokens": ("I32", np.dtype("<i4")),
    "suffixes": ("I64", np.dtype("<i8")),
}


def store_path(path: str | Path) -> Path:
    """The store's file: ``path`` itself, or the usual name in it when it is a directory."""
    path = Path(path).expanduser()
    return path / FILE_NAME if path.is_dir() else path


def save_store(store: TokenStore, path: Path) -> None:
    """Write the file under another name and rename it when complete; an interrupted write leaves nothing behind.

    Raises:
        OSError: when it cannot be written.
    """
    header = store.header
    metadata = {
        "format": _FORMAT,
        "vocab_size": str(header.vocab_size),
        "vocabulary": header.vocabulary,
        "model": header.model,
        "sources": json.dumps(header.sources),
    }
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        save_file({"tokens": store.tokens, "suffixes": store.suffixes}, partial, metadata)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def open_store(path: Path) -> TokenStore:
    """Map a store into memory and check it.

    Raises:
        InvalidOptionError: there is no such file, or it is something else.
        ModelFileError: truncated or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 8 + length <= size else b""
    except FileNotFoundError:
        raise InvalidOptionError(
            f"there is no datastore at '{path}'; build one: outrider datastore build FILES --output {path}"
        ) from None
    except OSError as error:
        raise ModelFileError(f"cannot read the datastore '{path}': {error.strerror or error}") from None
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        is_store = metadata["format"] == _FORMAT
    except (ValueError, KeyError, TypeError, AttributeError):
        is_store = False
    if not is_store:
        raise InvalidOptionError(f"'{path}' is not a datastore of this version; give what 'datastore build' wrote")
    try:
        header = StoreHeader(
            int(metadata["vocab_size"]),
            metadata["vocabulary"],
            metadata["model"],
            tuple(json.loads(metadata["sources"])),
        )
        arrays = {name: _map(path, 8 + length, size, name, entries[name]) for name in _DTYPES}
    except (ValueError, KeyError, TypeError):
        _damaged(path, "its header makes no sense")
    store = TokenStore(header, arrays["tokens"], arrays["suffixes"])
    _check(path, store)
    return store


def _map(path: Path, start: int, size: int, name: str, entry: dict[str, Any]) -> NDArray[Any]:
    """The array ``name`` of the file's data section, which begins at ``start``."""
    code, dtype = _DTYPES[name]
    (count,), (begin, end) = entry["shape"], entry["data_offsets"]
    if entry["dtype"] != code or count < 1 or begin < 0 or end - begin != count * dtype.itemsize:
        raise ValueError(name)
    if start + end > size:
        _damaged(path, f"it ends after {size} bytes, '{name}' should reach to {start + end}")
    mapped = np.memmap(path, dtype, "r", start + begin, (count,))
    return np.asarray(mapped)  # a plain view: reading single elements of a memmap is slow


def _check(path: Path, store: TokenStore) -> None:
    """Positions and tokens within their ranges: what lookups rely on."""
    count = len(store.tokens)
    if len(store.suffixes) != count or store.suffixes.min() < 0 or store.suffixes.max() >= count:
        _damaged(path, "its suffix array does not fit its tokens")
    if store.tokens[-1] != SEPARATOR or store.tokens.min() < SEPARATOR:
        _damaged(path, "its tokens make no sense")


def _damaged(path: Path, what: str) -> NoReturn:
    raise ModelFileError(f"the datastore '{path}' is damaged: {what}; build it again")
