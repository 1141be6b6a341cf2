"""A transformers directory (``config.json`` with safetensors or pickled weights) as a ``Checkpoint``.

Names of multimodal and of bare base models are normalised to those of ``*ForCausalLM``. Every tensor that the decoder
needs is checked for presence and shape when the directory is opened; weights are read one at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from outrider.errors import ModelFileError
from outrider.models.architectures import Fields
from outrider.models.checkpoint import Int4Weight
from outrider.models.config import DecoderConfig
from outrider.models.expected import check_shapes, expected_shapes
from outrider.models.family import config_from_hf
from outrider.models.shards import Shard, open_shards, read_json

_PREFIXES = (
    ("language_model.model.", "model."),  # Gemma-3's multimodal checkpoints on the hub
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),  # the same, saved by transformers 5
    ("layers.", "model.layers."),  # a base model without its language-model head
    ("embed_tokens.", "model.embed_tokens."),
    ("norm.", "model.norm."),
)


class PretrainedCheckpoint:
    """One directory of a supported architecture.

    Attributes:
        config: the decoder's shape; its ``eos_ids`` are those of ``generation_config.json`` where that has some.
        source: the directory.

    Raises:
        ModelFileError: missing, damaged, truncated or unsafe files, or a missing tensor.
        UnsupportedModelError: an architecture or feature that our decoder does not run.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.source = str(directory)
        if not (self.directory / "config.json").is_file():
            raise ModelFileError(f"{self.source} has no config.json; give a transformers model directory")
        self.config: DecoderConfig = self._read_config()
        self._shards: dict[str, tuple[str, Shard]] = {}
        for stored, shard in open_shards(self.directory).items():
            name = normalised(stored)
            if name in self._shards:
                raise ModelFileError(
                    f"{shard.path} holds both '{stored}' and '{self._shards[name][0]}', which are the same tensor; "
                    "export the model again"
                )
            self._shards[name] = (stored, shard)
        shapes = {name: shard.shapes[stored] for name, (stored, shard) in self._shards.items()}
        check_shapes(self.config, shapes, self._weights_source())
        for name in expected_shapes(self.config):
            self._check_dtype(name)

    def names(self) -> Collection[str]:
        """All tensor names, normalised; parts that the decoder ignores (a vision tower) included."""
        return self._shards.keys()

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored: float32, float16 or bfloat16. It may share the mapped file; do not write to it.

        Raises:
            ModelFileError: when it is missing or unreadable, naming it and the file.
        """
        stored, shard = self._find(name)
        self._check_dtype(name)
        return shard.load(stored)

    def int4(self, name: str) -> Int4Weight | None:
        """Always ``None``: these formats hold no 4-bit groups.

        Raises:
            ModelFileError: when there is no such tensor.
        """
        self._find(name)
        return None

    def _read_config(self) -> DecoderConfig:
        path = self.directory / "config.json"
        config = config_from_hf(read_json(path), str(path))
        generation = self.directory / "generation_config.json"
        if generation.is_file():
            eos_ids = Fields(read_json(generation), str(generation)).integers("eos_token_id")
            config = replace(config, eos_ids=eos_ids or config.eos_ids)
        return config

    def _find(self, name: str) -> tuple[str, Shard]:
        if name not in self._shards:
            raise ModelFileError(
                f"{self._weights_source()} has no tensor '{name}'; the model is incomplete, download it again"
            )
        return self._shards[name]

    def _check_dtype(self, name: str) -> None:
        stored, shard = self._find(name)
        if shard.dtypes[stored] is None:
            raise ModelFileError(
                f"{shard.path}: tensor '{stored}' is neither float32, float16 nor bfloat16; "
                "use the model's original, not its quantised, version"
            )

    def _weights_source(self) -> str:
        """The weight file, or the directory when there are several."""
        paths = {shard.path for _, shard in self._shards.values()}
        return str(paths.pop()) if len(paths) == 1 else self.source


def normalised(stored: str) -> str:
    """The ``*ForCausalLM`` name of a stored one (``language_model.model.norm.weight`` -> ``model.norm.weight``)."""
    for prefix, replacement in _PREFIXES:
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored
