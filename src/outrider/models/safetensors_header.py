"""Reading and checking a ``.safetensors`` file's header before its tensors are mapped.

Format: 8 bytes little-endian header length, a JSON dictionary name -> {dtype, shape, data_offsets}, then the data.
The ``safetensors`` package checks too; checking here first makes every complaint one sentence that names the tensor.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard

from outrider.errors import ModelFileError

_MAX_HEADER = 100 * 1024 * 1024  # the limit of the safetensors package
_DTYPES_BY_BYTES = {
    8: ("F64", "I64", "U64", "C64"),
    4: ("F32", "I32", "U32"),
    2: ("F16", "BF16", "I16", "U16"),
    1: ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"),
}
_DTYPE_BYTES = {dtype: size for size, dtypes in _DTYPES_BY_BYTES.items() for dtype in dtypes}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dtype (safetensors' code) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of ``path`` by their stored names.

    Raises:
        ModelFileError: unreadable, truncated or damaged; says what and names the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                _fail(path, f"is truncated: it has only {len(prefix)} bytes")
            length = int(struct.unpack("<Q", prefix)[0])
            if length > _MAX_HEADER:
                _fail(path, f"is damaged or no safetensors file: its header would be {length} bytes")
            if 8 + length > size:
                _fail(path, f"is truncated: the header ends at byte {8 + length}, the file has {size}")
            text = file.read(length)
    except OSError as error:
        raise ModelFileError(
            f"cannot read {path}: {error.strerror or error}; check the path and permissions"
        ) from error
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        _fail(path, "is damaged: its header is not JSON")
    if not isinstance(entries, dict):
        _fail(path, "is damaged: its header is not a dictionary")
    entries.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        tensors[name], begin, end = _entry(path, name, entry)
        if 8 + length + end > size:
            _fail(path, f"is truncated: tensor '{name}' ends at byte {8 + length + end}, the file has {size}")
        spans.append((begin, end, name))
    spans.sort()
    for before, after in itertools.pairwise(spans):
        if before[1] > after[0]:
            _fail(path, f"is damaged: tensors '{before[2]}' and '{after[2]}' overlap")
    return tensors


def _entry(path: Path, name: str, entry: object) -> tuple[StoredTensor, int, int]:
    """The tensor and its byte span [begin, end) in the data section."""
    if not isinstance(entry, dict):
        _fail(path, f"is damaged: the entry of tensor '{name}' is not a dictionary")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        _fail(path, f"holds tensor '{name}' in the unknown type {str(dtype)[:20]!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"is damaged: shape or offsets of tensor '{name}' make no sense")
    nbytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        _fail(path, f"is damaged: tensor '{name}' needs {nbytes} bytes but has {offsets[1] - offsets[0]}")
    return StoredTensor(dtype, tuple(shape)), offsets[0], offsets[1]


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _fail(path: Path, what: str) -> NoReturn:
    raise ModelFileError(f"{path} {what}; download the model again")
