"""Reading and checking a GGUF file's header (versions 2 and 3, little-endian) before any weight is touched.

Every length is compared with the file's size before it is read, so a damaged file costs a message and not memory.
Format: the GGUF specification of ggml (docs/gguf.md). Knows nothing of architectures.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from outrider.errors import ModelFileError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 17  # tensors, or metadata keys
_MAX_NAME = 1 << 16
_MAX_STRING = 1 << 24
_MAX_ARRAY = 1 << 24
_MAX_HEADER = 1 << 28
_MAX_ALIGNMENT = 1 << 20
_MAX_ELEMENTS = 1 << 48

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "<u1",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is row-major (the file's, reversed); ``start`` and ``nbytes`` in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A file's checked metadata and tensor directory."""

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Parse and check the header of ``path``.

    Raises:
        ModelFileError: not a GGUF, damaged, truncated, or laid out inconsistently; says which.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _parse(_Cursor(file, size, str(path)))
    except OSError as error:
        raise ModelFileError(
            f"cannot read {path}: {error.strerror or error}; check the path and permissions"
        ) from error


class _Cursor:
    """A reading position that refuses to pass the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: str) -> None:
        self.file, self.size, self.path = file, size, path
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path} {what}; download or convert the model again")

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > self.size:
            self.fail(f"is truncated: {what} ends at byte {end}, the file has {self.size}")
        if end > _MAX_HEADER:
            self.fail(f"is damaged: {what} ends {end} bytes into the header, more than any model needs")
        data = self.file.read(count)
        if len(data) != count:
            self.fail(f"is truncated: {what} ends at byte {end}, only {self.position + len(data)} could be read")
        self.position = end
        return data

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def count(self, what: str, largest: int) -> int:
        value = self.u64(what)
        if value > largest:
            self.fail(f"is damaged: {what} is {value}, more than the plausible {largest}")
        return value

    def string(self, what: str, longest: int = _MAX_STRING) -> str:
        data = self.take(self.count(f"the length of {what}", longest), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"is damaged: {what} is not UTF-8 text")


def _parse(cursor: _Cursor) -> GGUFHeader:
    if cursor.size < 24:
        cursor.fail(f"is no GGUF model: it has only {cursor.size} bytes")
    magic = cursor.take(4, "the magic number")
    if magic != _MAGIC:
        cursor.fail(f"is no GGUF model: it starts with {magic!r} instead of {_MAGIC!r}")
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        is_swapped = version and version & 0xFFFF == 0
        cursor.fail("is a big-endian GGUF" if is_swapped else f"has GGUF version {version}; readable are 2 and 3")
    tensor_count = cursor.count("the number of tensors", _MAX_ENTRIES)
    key_count = cursor.count("the number of metadata keys", _MAX_ENTRIES)
    metadata: dict[str, object] = {}
    for index in range(key_count):
        key = cursor.string(f"metadata key {index}", _MAX_NAME)
        if key in metadata:
            cursor.fail(f"is damaged: the metadata key '{key}' occurs twice")
        metadata[key] = _value(cursor, key)
    directory = [_tensor(cursor, index) for index in range(tensor_count)]
    alignment = _alignment(cursor, metadata)
    data_start = -(-cursor.position // alignment) * alignment
    return GGUFHeader(metadata, _place(cursor, directory, data_start, alignment))


def _value(cursor: _Cursor, key: str) -> object:
    kind = _value_type(cursor, key)
    what = f"the value of '{key}'"
    if kind is GGUFValueType.STRING:
        return cursor.string(what)
    if kind is not GGUFValueType.ARRAY:
        return _scalars(cursor, kind, 1, what)[0]
    item = _value_type(cursor, key)
    if item is GGUFValueType.ARRAY:
        cursor.fail(f"is damaged: '{key}' is an array of arrays")
    count = cursor.count(f"the length of '{key}'", _MAX_ARRAY)
    if item is GGUFValueType.STRING:
        return [cursor.string(what) for _ in range(count)]
    return _scalars(cursor, item, count, what)


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    code = cursor.u32(f"the type of '{key}'")
    try:
        return GGUFValueType(code)
    except ValueError:
        cursor.fail(f"is damaged: '{key}' has the unknown value type {code}")


def _scalars(cursor: _Cursor, kind: GGUFValueType, count: int, what: str) -> list[object]:
    dtype = np.dtype(_SCALARS[kind])
    values: list[object] = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype).tolist()
    return [bool(value) for value in values] if kind is GGUFValueType.BOOL else values


def _tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One entry of the directory; ``start`` is still relative to the data section."""
    name = cursor.string(f"the name of tensor {index}", _MAX_NAME)
    dimensions = cursor.u32(f"the dimensions of '{name}'")
    if not 1 <= dimensions <= 4:
        cursor.fail(f"is damaged: tensor '{name}' has {dimensions} dimensions")
    shape = tuple(cursor.u64(f"the shape of '{name}'") for _ in range(dimensions))[::-1]
    elements = 1
    for length in shape:
        elements *= length
    if not 0 < elements <= _MAX_ELEMENTS:
        cursor.fail(f"is damaged: tensor '{name}' has the implausible shape {list(shape)}")
    code = cursor.u32(f"the type of '{name}'")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        cursor.fail(f"holds tensor '{name}' in the unknown type {code}, which this version cannot read")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        cursor.fail(f"is damaged: rows of '{name}' have {shape[-1]} values, no multiple of {kind.name}'s {block}")
    start = cursor.u64(f"the offset of '{name}'")
    return TensorInfo(name, shape, kind, start, elements // block * block_bytes)


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        cursor.fail(f"is damaged: its alignment {str(value)[:20]} is no power of two")
    return value


def _place(cursor: _Cursor, directory: list[TensorInfo], data_start: int, alignment: int) -> dict[str, TensorInfo]:
    """Absolute positions, after checking alignment, bounds, overlap and names."""
    tensors: dict[str, TensorInfo] = {}
    for info in directory:
        if info.name in tensors:
            cursor.fail(f"is damaged: tensor '{info.name}' occurs twice")
        if info.start % alignment:
            cursor.fail(f"is damaged: tensor '{info.name}' starts at {info.start}, no multiple of {alignment}")
        start = data_start + info.start
        if start + info.nbytes > cursor.size:
            end = start + info.nbytes
            cursor.fail(f"is truncated: tensor '{info.name}' ends at byte {end}, the file has {cursor.size}")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, start, info.nbytes)
    ordered = sorted(tensors.values(), key=lambda info: info.start)
    for before, after in itertools.pairwise(ordered):
        if before.start + before.nbytes > after.start:
            cursor.fail(f"is damaged: tensors '{before.name}' and '{after.name}' overlap")
    return tensors
