"""The weight files of a transformers directory: which there are, what they hold, and how a tensor is read from them.

Two kinds, safetensors and pickles, each one file or shards listed by an index. Pickles are only read by torch's
restricted unpickler, which runs no code. Knows nothing of architectures or of the names' meaning.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.models.safetensors_header import read_safetensors_header

_SAFETENSORS = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.pt", "model.pt")
_MAX_JSON = 64 * 1024 * 1024
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Shard(ABC):
    """One weight file. ``shapes`` and ``dtypes`` are known after construction; a dtype is ``None`` if unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """The tensor ``name`` as stored.

        Raises:
            ModelFileError: it cannot be read.
        """


class SafetensorsShard(Shard):
    """A ``.safetensors`` file, mapped on the first ``load``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for name, tensor in read_safetensors_header(path).items():
            self.shapes[name] = tensor.shape
            self.dtypes[name] = _DTYPES.get(tensor.dtype)

    def load(self, name: str) -> Tensor:
        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except Exception as error:
            raise ModelFileError(f"cannot read tensor '{name}' of {self.path}: {_line(error)}") from error


class PickleShard(Shard):
    """A ``pytorch_model.bin``: tensors only, mapped, by the unpickler that refuses everything else."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ModelFileError(
                f"{path} was not loaded: {_reason(error)}; convert the model to safetensors, "
                "or download it again from a source that you trust"
            ) from error
        if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ModelFileError(f"{path} is no dictionary of tensors; export the model's state_dict as safetensors")
        self._tensors: dict[str, Tensor] = {str(name): value for name, value in loaded.items()}
        for name, tensor in self._tensors.items():
            self.shapes[name] = tuple(tensor.shape)
            self.dtypes[name] = tensor.dtype if tensor.dtype in _DTYPES.values() else None

    def load(self, name: str) -> Tensor:
        return self._tensors[name].detach().contiguous()


def open_shards(directory: Path) -> dict[str, Shard]:
    """Every tensor of a directory, by stored name, with the shard that holds it. Safetensors win over pickles.

    Raises:
        ModelFileError: no weights, a missing or damaged shard, an unsafe index or pickle.
    """
    for single in (_SAFETENSORS, *_PICKLES):
        kind = SafetensorsShard if single == _SAFETENSORS else PickleShard
        if (directory / single).is_file():
            shard = kind(directory / single)
            return dict.fromkeys(shard.shapes, shard)
        if (directory / f"{single}.index.json").is_file():
            return _indexed(directory, directory / f"{single}.index.json", kind)
    raise ModelFileError(
        f"{directory} has no weights ({_SAFETENSORS}, {_PICKLES[0]} or an index of shards); "
        "download the model completely, or give a .gguf file"
    )


def _indexed(directory: Path, index: Path, kind: type[SafetensorsShard | PickleShard]) -> dict[str, Shard]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index} has no 'weight_map'; download the model again")
    for file in weight_map.values():
        # A shard lies beside its index: anything else could name a file that is not the model's.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise ModelFileError(f"{index} names the shard {str(file)[:80]!r} outside its own directory; refused")
        if not (directory / file).is_file():
            raise ModelFileError(f"the shard {directory / file} is missing ({index.name} lists it); download it again")
    shards = {file: kind(directory / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in shards[file].shapes:
            raise ModelFileError(f"{directory / file} lacks tensor '{name}' ({index.name} lists it); download it again")
    return {name: shards[file] for name, file in weight_map.items()}


def read_json(path: Path) -> dict[str, object]:
    """A JSON file that must hold a dictionary.

    Raises:
        ModelFileError: unreadable, too large, or something else.
    """
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelFileError(f"{path} is implausibly large for a configuration; download the model again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(
            f"cannot read {path}: {error.strerror or error}; check the path and permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({_line(error)}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON dictionary; download the model again")
    return value


def _reason(error: Exception) -> str:
    text = str(error)
    if "weights_only" in text or "Unsupported global" in text or "WeightsUnpickler" in text:
        return "its pickle needs more than tensors, and loading that could run code"
    if "mmap can only be used" in text:
        return "it has the format of torch before 1.6"
    return f"it is damaged or truncated ({_line(error)})"


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
