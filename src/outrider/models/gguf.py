"""A GGUF file as a ``Checkpoint``: tensors dequantised one at a time, 4-bit blocks handed over as they are.

The header is checked completely (``gguf_header.py``) and against the configuration before the file is mapped. Block
formats other than Q4_0 and Q4_1 are decoded by the ``gguf`` package. Tokenizers read ``metadata``; this module doesn't.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.models.architectures import refuse_feature
from outrider.models.checkpoint import GROUP, Int4Weight
from outrider.models.config import DecoderConfig
from outrider.models.expected import check_shapes, expected_shapes
from outrider.models.gguf_config import ROPE_FACTORS, config_from_gguf
from outrider.models.gguf_header import TensorInfo, read_header
from outrider.models.gguf_names import INTERLEAVED_ARCHITECTURES, half_split_rows, to_gguf, to_transformers

_DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_IGNORED = (ROPE_FACTORS, "rope_freqs", "attn_rot_embd")  # rotary tables: recomputed, or read into the configuration


class GGUFCheckpoint:
    """One ``.gguf`` file of a supported architecture.

    Attributes:
        config: the decoder's shape.
        source: the file's path.
        metadata: the key/value section, Python objects by GGUF key.

    Raises:
        ModelFileError: the file is not a GGUF, damaged, truncated or incomplete; or a tensor's type is not readable.
        UnsupportedModelError: an architecture or feature that our decoder does not run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.source = str(path)
        header = read_header(self.path)
        self.metadata: dict[str, object] = header.metadata
        self._file_tensors = header.tensors
        names = header.tensors.keys()
        self._data: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        factors = self._rope_factors() if ROPE_FACTORS in names else None
        self.config: DecoderConfig = config_from_gguf(header.metadata, names, factors, self.source)
        self._tensors = self._by_transformers_name()
        check_shapes(self.config, {name: info.shape for name, info in self._tensors.items()}, self.source)
        for name in expected_shapes(self.config):
            self._check_readable(self._tensors[name])

    def names(self) -> Collection[str]:
        """All tensor names, as transformers has them."""
        return self._tensors.keys()

    def tensor(self, name: str) -> Tensor:
        """The tensor: float32, float16 or bfloat16 as stored; float32 when dequantised. A fresh copy.

        Raises:
            ModelFileError: when the file has no such tensor, or its blocks cannot be decoded.
        """
        info = self._info(name)
        return self._reordered(name, self._decode(info))

    def int4(self, name: str) -> Int4Weight | None:
        """The matrix as stored in 4-bit groups (Q4_0 and Q4_1), ``None`` for other types.

        Raises:
            ModelFileError: when the file has no such tensor.
        """
        info = self._info(name)
        if info.kind not in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1) or len(info.shape) != 2:
            return None
        weight = _int4_blocks(self._blocks(info), info.kind)
        order = self._row_order(name, info.shape[0])
        return weight if order is None else weight.rows(order)

    def _by_transformers_name(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for info in self._file_tensors.values():
            if any(part in info.name for part in _IGNORED):
                continue
            name = to_transformers(info.name, self.config.family)
            if name is None or to_gguf(name, self.config.family) != info.name:
                # Running without a tensor that the file has would silently change the output.
                refuse_feature(f"the tensor '{info.name}' ({self.source}, architecture '{self.config.family}')")
            tensors[name] = info
        return tensors

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.source} has no tensor '{name}'; the model is incomplete, download it again")
        return info

    def _check_readable(self, info: TensorInfo) -> None:
        if info.kind not in _DENSE and not _is_decodable(info.kind):
            raise ModelFileError(
                f"{self.source}: tensor '{info.name}' is stored as {info.kind.name}, which cannot be decoded; "
                "quantise the model to Q4_1, Q8_0 or a K type instead"
            )

    def _rope_factors(self) -> Sequence[float]:
        info = self._file_tensors[ROPE_FACTORS]
        if info.kind is not GGMLQuantizationType.F32 or len(info.shape) != 1 or info.shape[0] > 4096:
            raise ModelFileError(f"{self.source}: '{ROPE_FACTORS}' is no float32 vector; the file is damaged")
        return [float(factor) for factor in self._decode(info)]

    def _bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes, a view of the mapped file."""
        if not self._data.size:
            try:
                self._data = np.memmap(self.path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise ModelFileError(f"cannot read {self.source}: {error}; check the path and permissions") from error
        return self._data[info.start : info.start + info.nbytes]

    def _blocks(self, info: TensorInfo) -> NDArray[np.uint8]:
        """uint8 [rows, bytes of a row]."""
        block, block_bytes = GGML_QUANT_SIZES[info.kind]
        return self._bytes(info).reshape(-1, info.shape[-1] // block * block_bytes)

    def _decode(self, info: TensorInfo) -> Tensor:
        dtype = _DENSE.get(info.kind)
        if dtype is not None:
            return torch.from_numpy(np.array(self._bytes(info))).view(dtype).view(info.shape)
        try:
            values = dequantize(np.asarray(self._blocks(info)), info.kind)
            return torch.from_numpy(np.array(values, dtype=np.float32)).view(info.shape)
        except Exception as error:
            raise ModelFileError(
                f"{self.source}: tensor '{info.name}' ({info.kind.name}) cannot be decoded ({error}); "
                "download or convert the model again"
            ) from error

    def _reordered(self, name: str, tensor: Tensor) -> Tensor:
        order = self._row_order(name, tensor.shape[0])
        return tensor if order is None else tensor[order]

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        is_rotary = ".self_attn.q_proj." in name or ".self_attn.k_proj." in name
        if not is_rotary or self.config.family not in INTERLEAVED_ARCHITECTURES:
            return None
        return half_split_rows(rows, self.config.head_dim)


def _int4_blocks(rows: NDArray[np.uint8], kind: GGMLQuantizationType) -> Int4Weight:
    """Unpack Q4_0 (scale d; weight d (code - 8)) or Q4_1 (scale d, minimum m; weight d code + m) without rounding."""
    header = 2 if kind is GGMLQuantizationType.Q4_0 else 4
    blocks = rows.reshape(rows.shape[0], -1, header + GROUP // 2)
    packed = blocks[:, :, header:]
    # Byte j holds value j in its low half and value j + 16 in its high half.
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(rows.shape[0], -1)
    constants = np.ascontiguousarray(blocks[:, :, :header]).view("<f2").astype(np.float32)
    scales = constants[:, :, 0]
    minimums = -8.0 * scales if kind is GGMLQuantizationType.Q4_0 else constants[:, :, 1]
    return Int4Weight(
        torch.from_numpy(codes),
        torch.from_numpy(np.ascontiguousarray(scales)),
        torch.from_numpy(np.ascontiguousarray(minimums)),
    )


@cache
def _is_decodable(kind: GGMLQuantizationType) -> bool:
    """Whether the ``gguf`` package decodes a type: tried on one empty block, since it lists them nowhere public."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
