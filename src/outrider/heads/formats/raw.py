"""A head's files as they lie on disk: tensors by stored name and the configuration, before anyone says what they mean.

SRC is a directory (weights and ``config.json``) or one weight file (a ``config.json`` beside it is read too). Pickles
go through torch's restricted unpickler, which runs no code. Knows no method and no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.errors import ModelFileError
from outrider.models.shards import PickleShard, SafetensorsShard, Shard, open_shards, read_json

CONFIG_FILE = "config.json"
_HEAD_FILES = (
    "head.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
_PICKLE_ENDINGS = (".pt", ".bin", ".pth")


@dataclass(frozen=True, slots=True)
class RawHead:
    """Stored tensors (read when asked for) and configuration.

    Attributes:
        path: what the user named, for messages.
        shards: stored name -> file that holds it.
        config: ``config.json``; empty when there is none.
        has_config: whether there is one.
    """

    path: Path
    shards: Mapping[str, Shard]
    config: Mapping[str, object]
    has_config: bool

    @property
    def names(self) -> frozenset[str]:
        """All stored names."""
        return frozenset(self.shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor.

        Raises:
            ModelFileError: there is no such tensor.
        """
        if name not in self.shards:
            raise ModelFileError(f"{self.path} has no tensor '{name}'; the head is incomplete or of another format")
        return self.shards[name].shapes[name]

    def tensor(self, name: str) -> Tensor:
        """A stored tensor.

        Raises:
            ModelFileError: it is missing or cannot be read.
        """
        self.shape(name)
        return self.shards[name].load(name)

    @property
    def architecture(self) -> str:
        """First of the configuration's ``architectures``; empty when it has none."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""


def open_raw(path: Path) -> RawHead:
    """Open a head of whatever format.

    Raises:
        ModelFileError: nothing there, no weights, damaged files, a pickle that needs more than tensors.
    """
    if path.is_dir():
        config = path / CONFIG_FILE
        found = next((path / name for name in _HEAD_FILES if (path / name).is_file()), None)
        shards = _one_file(found) if found is not None else open_shards(path)
    elif path.is_file():
        config = path.parent / CONFIG_FILE
        shards = _one_file(path)
    else:
        raise ModelFileError(f"there is no head at '{path}'; give its directory or weight file")
    has_config = config.is_file()
    return RawHead(path, shards, read_json(config) if has_config else {}, has_config)


def _one_file(path: Path) -> dict[str, Shard]:
    if path.suffix == ".safetensors":
        shard: Shard = SafetensorsShard(path)
    elif path.suffix in _PICKLE_ENDINGS:
        shard = PickleShard(path)
    else:
        raise ModelFileError(f"'{path}' is no weight file (.safetensors, .pt, .bin); give a head's directory")
    return dict.fromkeys(shard.shapes, shard)
