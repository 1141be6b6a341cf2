"""Outrider's own head file: one safetensors file with the spec's tensors, the draft vocabulary and the configuration.

``d2t`` int64 [Vd] holds offsets as EAGLE-3 files do: draft token i is target token i + d2t[i]. It exists only for a
reduced vocabulary; without a valid one such a file is refused. Reading is strict: a missing, extra, misshapen or NaN
tensor is an error that names it. Other projects' files are read by ``heads/formats`` and end up here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.heads.config import HeadConfig
from outrider.heads.network import DraftNetwork
from outrider.heads.registry import network_class
from outrider.models.whole_file import whole_file

CONFIG, CARD = "outrider.head", "outrider.card"
MAP = "d2t"
HEAD_FILE = "head.safetensors"
"""Name of the file in a directory that holds nothing but a head."""

Network = DraftNetwork[Any]


def build_network(method: str, config: HeadConfig, tensors: Mapping[str, Tensor], where: str) -> Network:
    """A network in evaluation mode from its tensors (``d2t`` among them when the vocabulary is reduced).

    Args:
        where: the file, for messages.

    Raises:
        ModelFileError: naming the tensor that is missing, extra, misshapen or not finite, or the map's flaw.
    """
    network = network_class(method)(config)
    expected = dict(network.expected())
    tensors = dict(tensors)
    network.draft_ids = read_draft_ids(tensors.pop(MAP, None), config, where)
    check_tensors(tensors, expected, where)
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.eval().requires_grad_(False)


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse tensors that are not exactly the expected ones.

    Raises:
        ModelFileError: naming the first difference.
    """
    if missing := sorted(set(expected) - set(tensors)):
        raise ModelFileError(f"{where} has no tensor '{missing[0]}'; the head is incomplete or of another method")
    if extra := sorted(set(tensors) - set(expected)):
        raise ModelFileError(f"{where} has an unknown tensor '{extra[0]}'; the head is of another method or variant")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise ModelFileError(f"{where}: tensor '{name}' has shape {found}, the configuration asks for {shape}")
        if not tensors[name].is_floating_point():
            found_type = str(tensors[name].dtype).removeprefix("torch.")
            raise ModelFileError(f"{where}: tensor '{name}' holds {found_type}, it must be floating point")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise ModelFileError(f"{where}: tensor '{name}' holds NaN or infinite values; the training run diverged")


def read_draft_ids(offsets: Tensor | None, config: HeadConfig, where: str) -> Tensor | None:
    """The target ids of the draft tokens, int64 [Vd] ascending, from their offsets; ``None`` for a full vocabulary.

    Raises:
        ModelFileError: for a reduced vocabulary without a valid map.
    """
    size = config.draft_vocab_size
    if size > config.vocab_size:
        raise ModelFileError(f"{where}: draft vocabulary {size} is larger than the target's {config.vocab_size}")
    if size == config.vocab_size:
        # A map of zeros is what some projects store here.
        if offsets is not None and bool(offsets.any()):
            raise ModelFileError(f"{where} guesses all {size} tokens, but its map '{MAP}' moves some")
        return None
    if offsets is None:
        raise ModelFileError(f"{where} guesses {size} of {config.vocab_size} tokens but has no map '{MAP}' of them")
    if tuple(offsets.shape) != (size,):
        raise ModelFileError(f"{where}: '{MAP}' has shape {tuple(offsets.shape)}, not {(size,)}")
    ids = torch.arange(size) + offsets.to(torch.int64)
    is_valid = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < config.vocab_size
    if not is_valid or not bool(offsets.any()):
        raise ModelFileError(f"{where}: '{MAP}' is not an ascending map into the target's {config.vocab_size} tokens")
    return ids


def draft_offsets(ids: Tensor) -> Tensor:
    """``d2t`` of ascending target ids [Vd]."""
    return ids - torch.arange(len(ids))


def save_head(
    path: Path, network: Network, card: Mapping[str, object] | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write ``network`` to ``path``; the file appears whole or not at all.

    Args:
        card: how it was made (command, data, seed, figures), stored beside the configuration.

    Raises:
        RunError: when it cannot be stored.
    """
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in network.state_dict().items()}
    if network.draft_ids is not None:
        tensors[MAP] = draft_offsets(network.draft_ids.cpu())
    metadata = {CONFIG: network.config.model_dump_json(), CARD: json.dumps(dict(card or {}))}
    with whole_file(path, "make room or choose another place") as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata=metadata)


def load_head(path: Path, method: str | None = None) -> Network:
    """Read a head file of ours.

    Args:
        method: what it must be; ``None`` accepts any.

    Raises:
        ModelFileError: when it is no head file, of another method, or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        text = metadata[CONFIG]
        found = str(json.loads(text)["method"])
    except KeyError:
        raise ModelFileError(f"{path} is not a head file of Outrider; import others with 'outrider convert'") from None
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise ModelFileError(f"cannot read the head {path}: {error}") from None
    if method not in (None, found):
        raise ModelFileError(f"{path} is a head for --drafter {found}, not {method}")
    try:
        config = network_class(found).Config.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ModelFileError(f"{path}: configuration field '{place}': {first['msg']}") from None
    return build_network(found, config, tensors, str(path))


def read_card(path: Path) -> dict[str, Any]:
    """How a head file was made, as ``save_head`` was told."""
    with safe_open(path, "pt") as file:
        card: dict[str, Any] = json.loads((file.metadata() or {}).get(CARD, "{}"))
    return card
