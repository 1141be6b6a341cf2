"""Which trained head a drafter uses: a file, one that ships for the target, or untrained numbers for a try.

Shipped heads are named in ``data/heads/index.json`` under the target's fingerprint. Every head is checked against the
target before it drafts: sizes, hidden states, fingerprint and tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from outrider.drafters.base import DraftOptions, DraftParts
from outrider.drafters.shipped import shipped_head
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.heads.build import untrained_head
from outrider.heads.file import HEAD_FILE, load_head
from outrider.heads.network import DraftNetwork
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.models.fingerprint import fingerprint

AUTO, RANDOM = "auto", "random"

HeadOption = Annotated[
    str,
    Field(description="head file; auto: the one that ships for the target; random: an untrained one, to try things"),
]


class HeadOptions(DraftOptions):
    """Options of drafters with a trained head."""

    head: HeadOption = AUTO
    weights: Annotated[
        Literal["auto", "full", "int4"],
        Field(description="how the head is held: full, int4 (read faster, rounded), auto: int4 where the target is"),
    ] = "auto"

    def wants_int4(self, target: LanguageModel) -> bool:
        """Whether the head's products are rounded to 4-bit groups."""
        return self.weights == "int4" or (self.weights == "auto" and target.weight_format == "int4")


class RecurrentHeadOptions(HeadOptions):
    """Options of drafters whose head has a layer with attention."""

    window: Annotated[
        int, Field(ge=0, le=1_000_000, description="of a long prompt the head reads this many last rows; 0: all")
    ] = 256


def open_head(method: str, head: str, parts: DraftParts) -> DraftNetwork[Any]:
    """The network that ``head`` names, checked against the target, its target rows bound.

    Raises:
        InvalidOptionError: when no head ships for the target, or the file does not exist.
        ModelFileError: when the file is damaged or of another method.
        IllegalCombinationError: when the head was made for another target, saying what differs.
    """
    target = parts.target
    if head == RANDOM:
        network = untrained_head(method, target)
    else:
        path = shipped_head(method, target) if head == AUTO else _given_file(head)
        if path is None and head == AUTO:
            raise InvalidOptionError(
                f"no {method} head ships for '{target.name}'; train one with 'outrider train {method}' and give "
                f"--drafter {method}:head=FILE"
            )
        if path is None:
            raise InvalidOptionError(f"no head file '{head}'; give a file of 'outrider train {method}' or 'convert'")
        network = load_head(path, method)
        check_head(network, parts, str(path))
    bind_target(network, target)
    return network


def _given_file(head: str) -> Path | None:
    """The file that ``head`` names, or the one in the directory that 'outrider convert' wrote, if there is one."""
    try:
        path = Path(head).expanduser()
        path = path / HEAD_FILE if path.is_dir() else path
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no such user's home
        return None


def bind_target(network: DraftNetwork[Any], target: LanguageModel) -> None:
    """Give the network the target's output rows, if it has no output matrix of its own."""
    if network.needs_target_rows:
        network.bind(target.output_rows(network.draft_ids), target.final_soft_cap)


def check_head(network: DraftNetwork[Any], parts: DraftParts, where: str) -> None:
    """Refuse a head whose sizes, hidden states, target or tokenizer are not the target's.

    Raises:
        IllegalCombinationError: naming what differs.
    """
    config, target = network.config, parts.target
    sizes = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    )
    for what, mine, theirs in sizes:
        if mine != theirs:
            raise IllegalCombinationError(
                f"{where} was made for a target with {what} {mine}, '{target.name}' has {theirs}; use its own head"
            )
    blocks = [name for name in config.features if name != FINAL_HIDDEN]
    if bad := [name for name in blocks if not (isinstance(name, int) and 0 <= name < target.num_layers)]:
        raise IllegalCombinationError(
            f"{where} reads the input of block {bad[0]}, '{target.name}' has blocks 0 to {target.num_layers - 1}"
        )
    key = fingerprint(target)
    if config.target and key is not None and config.target != key:
        raise IllegalCombinationError(
            f"{where} was trained on a target with fingerprint {config.target}, '{target.name}' has {key}: its guesses "
            "would rarely be right; use a head trained on this model"
        )
    if config.tokenizer and parts.vocabulary_hash is not None and config.tokenizer != parts.vocabulary_hash():
        raise IllegalCombinationError(
            f"{where} was trained with another tokenizer than that of '{target.name}'; use a head trained on this model"
        )


def compute_dtype(target: LanguageModel) -> torch.dtype:
    """What heads compute in: the target's dtype, float32 for a float64 table."""
    return torch.float32 if target.dtype is torch.float64 else target.dtype
