"""Outrider's own head file as one of the formats, so that conversion has two equal sides."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from safetensors import safe_open

from outrider.errors import ModelFileError
from outrider.heads.file import CONFIG, HEAD_FILE, load_head, save_head
from outrider.heads.formats.base import HeadFormat, Network, TargetFacts, check_target
from outrider.heads.formats.raw import RawHead
from outrider.heads.registry import NETWORKS


class OwnFormat(HeadFormat):
    """One safetensors file with its configuration inside (``heads/file.py``)."""

    name: ClassVar[str] = "outrider"
    summary: ClassVar[str] = "Outrider's head file, for --drafter METHOD:head=FILE"
    writes: ClassVar[tuple[str, ...]] = tuple(NETWORKS)

    def detect(self, raw: RawHead) -> bool:
        path = _file(raw)
        if path is None:
            return False
        with safe_open(path, "pt") as file:
            return CONFIG in (file.metadata() or {})

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        path = _file(raw)
        if path is None:
            raise ModelFileError(f"'{raw.path}' is no head file of Outrider, which is one .safetensors file")
        network = load_head(path)
        check_target(network.config, target, raw.path)
        return network

    def write(self, network: Network, folder: Path, target: TargetFacts | None, dtype: torch.dtype) -> None:
        save_head(folder / HEAD_FILE, network, dtype=dtype)


def _file(raw: RawHead) -> Path | None:
    """The one safetensors file that all tensors are in."""
    paths = {shard.path for shard in raw.shards.values()}
    path = paths.pop() if len(paths) == 1 else None
    return path if path is not None and path.suffix == ".safetensors" else None
