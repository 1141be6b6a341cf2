"""Writing a head's files: tensors and a configuration in an empty folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import RunError
from outrider.heads.file import draft_offsets
from outrider.heads.formats.base import Network
from outrider.heads.formats.raw import CONFIG_FILE

WEIGHTS_FILE = "model.safetensors"


def vocabulary_maps(network: Network) -> dict[str, Tensor]:
    """``d2t`` int64 [Vd] and ``t2d`` bool [V] of a reduced draft vocabulary; nothing for a full one."""
    if network.draft_ids is None:
        return {}
    ids = network.draft_ids.cpu()
    chosen = torch.zeros(network.config.vocab_size, dtype=torch.bool)
    chosen[ids] = True
    return {"d2t": draft_offsets(ids), "t2d": chosen}


def write_files(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object], dtype: torch.dtype) -> None:
    """Write ``model.safetensors`` (floating-point tensors in ``dtype``) and ``config.json``.

    Raises:
        RunError: they cannot be stored.
    """
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    stated = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {folder}: {error}; make room or choose another place") from None
