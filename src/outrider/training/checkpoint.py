"""Everything that a training run needs to go on as if it had never stopped, in one safetensors file.

Tensors: ``model.*`` (float32 masters), ``adam.*`` (moments), ``random.*`` (generator states) and ``draft_ids``. The
header's JSON holds settings, data identity, place in the data, counters and curves. A file is written under a temporary
name and renamed; the last two are kept, and a damaged newest one (power cut) falls back to the one before. Nothing is
ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import RunError, UsageError
from outrider.models.whole_file import whole_file

STATE = "outrider.training"
KEPT = 2

Json = dict[str, Any]


@dataclass(slots=True)
class Checkpoint:
    """A run's state.

    Attributes:
        settings: what decides the run's result; another run's checkpoint is refused by the name of what differs.
        tokens: trained on so far; orders the files.
        state: counters, place and curves, plain JSON.
        tensors: by the names above.
    """

    settings: Json
    tokens: int
    state: Json
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Tensors below ``prefix.``, without it."""
        start = prefix + "."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


def checkpoint_paths(folder: Path) -> list[Path]:
    """A folder's checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint-*.safetensors"))


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` and forget all but the last two.

    Raises:
        RunError: when it cannot be stored; the checkpoints that were there stay.
    """
    path = folder / f"checkpoint-{checkpoint.tokens:014d}.safetensors"
    text = json.dumps({"settings": checkpoint.settings, "tokens": checkpoint.tokens, "state": checkpoint.state})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    advice = "make room and run the same command again: it goes on from the one before"
    with whole_file(path, advice, is_synced=True, what="the checkpoint ") as part:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_parts(folder)  # a run that was killed while it wrote left one
        save_file(tensors, part, metadata={STATE: text})
    for old in checkpoint_paths(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """One file.

    Raises:
        RunError: when it is damaged or no checkpoint.
    """
    try:
        with safe_open(path, "pt") as file:
            found = json.loads((file.metadata() or {})[STATE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        return Checkpoint(found["settings"], found["tokens"], found["state"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"cannot read the checkpoint {path}: {error}; --restart trains from the beginning") from None


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest one that can be read; ``None`` when there is none.

    Raises:
        RunError: when there are some and all are damaged.
    """
    paths = checkpoint_paths(folder)
    for path in reversed(paths[1:]):
        try:
            return read_checkpoint(path)
        except RunError:
            continue
    return read_checkpoint(paths[0]) if paths else None


def check_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with other settings than the checkpoint's.

    Raises:
        UsageError: naming the first that differs, with both values.
    """
    asked = json.loads(json.dumps(dict(wanted)))  # tuples are lists once they were stored
    for name in [*asked, *found]:
        if found.get(name) != asked.get(name):
            raise UsageError(
                f"{folder} holds a training run with {name}={_shown(found.get(name))}, this one has "
                f"{name}={_shown(asked.get(name))}; use the same settings to go on, --restart to begin again, or "
                "another --work-dir"
            )


def remove_checkpoints(folder: Path) -> None:
    """Forget a run."""
    _remove_parts(folder)
    for path in checkpoint_paths(folder):
        path.unlink(missing_ok=True)


def random_state() -> dict[str, Tensor]:
    """States of torch's own generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators where they were."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _remove_parts(folder: Path) -> None:
    for path in folder.glob("checkpoint-*.part"):
        path.unlink(missing_ok=True)


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
