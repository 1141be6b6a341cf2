"""What every head format is: detect, read, and for some write; and what a target adds that head files leave out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.heads.config import HeadConfig
from outrider.heads.formats.raw import RawHead
from outrider.heads.network import DraftNetwork
from outrider.models.base import LanguageModel
from outrider.models.fingerprint import fingerprint

Network = DraftNetwork[Any]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target of a head: head files lack some of its sizes, and other engines want copies of its tensors.

    Attributes:
        name: what the user called it.
        hidden_size, vocab_size, num_layers, context_length: of the target.
        fingerprint: ``models/fingerprint.py``; empty when it has none.
        tokenizer: hash of its vocabulary; empty when not known.
        embedding, output: read the input and output matrices, [vocab_size, hidden_size].
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_length: int
    fingerprint: str
    tokenizer: str
    embedding: Callable[[], Tensor]
    output: Callable[[], Tensor]


def facts_of(model: LanguageModel, name: str, tokenizer: str = "") -> TargetFacts:
    """The facts of a loaded target."""
    return TargetFacts(
        name=name,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        context_length=model.context_length,
        fingerprint=fingerprint(model) or "",
        tokenizer=tokenizer,
        embedding=lambda: model.embed(torch.arange(model.vocab_size)),
        output=model.output_rows,
    )


class HeadFormat(ABC):
    """One public layout of head files.

    Attributes:
        name: of ``--from`` and ``--to``.
        summary: one line for listings.
        writes: methods whose heads it can be written from; none for formats that are only read.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    writes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def detect(self, raw: RawHead) -> bool:
        """Whether the files look like this format. Outrider's own is asked first; of the others one at most agrees."""

    @abstractmethod
    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        """The head as a network of ours, in evaluation mode.

        Raises:
            ModelFileError: tensors missing, extra, misshapen, of a wrong type, not finite; a vocabulary map that makes
                no sense; a configuration that contradicts the tensors or has fields that nobody here knows.
            InvalidOptionError: what the files leave open needs ``--target``.
            UnsupportedModelError: a variant that Outrider does not compute.
        """

    def write(self, network: Network, folder: Path, target: TargetFacts | None, dtype: torch.dtype) -> None:
        """Write the head's files into an empty ``folder``, floating-point tensors in ``dtype``.

        Raises:
            InvalidOptionError: the format is only read, or needs ``--target``.
            IllegalCombinationError: this format has no place for this head.
        """
        raise InvalidOptionError(f"the format '{self.name}' can be read, not written")

    def check_method(self, network: Network) -> None:
        """Refuse a head of a method that this format does not hold."""
        if network.config.method not in self.writes:
            raise IllegalCombinationError(
                f"the format '{self.name}' holds heads of {', '.join(self.writes)}, not {network.config.method}; "
                "choose another --to"
            )


def need_target(target: TargetFacts | None, why: str) -> TargetFacts:
    """The target, or a message that says what it is needed for."""
    if target is None:
        raise InvalidOptionError(f"{why}; name the model that the head is for: --target MODEL")
    return target


def identity(target: TargetFacts | None) -> dict[str, str]:
    """Configuration fields that bind a head to its target."""
    return {} if target is None else {"target": target.fingerprint, "tokenizer": target.tokenizer}


def check_target(config: HeadConfig, target: TargetFacts | None, where: object) -> None:
    """Refuse a head whose sizes are not the target's.

    Raises:
        IllegalCombinationError: naming what differs.
    """
    if target is None:
        return
    pairs = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    )
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise IllegalCombinationError(
                f"{where} was made for a model with {what} {mine}, '{target.name}' has {theirs}; name its own --target"
            )
    if config.target and target.fingerprint and config.target != target.fingerprint:
        raise IllegalCombinationError(
            f"{where} was trained on a model with fingerprint {config.target}, "
            f"'{target.name}' has {target.fingerprint}; name its own --target"
        )
    if bad := [name for name in config.features if isinstance(name, int) and not 0 <= name < target.num_layers]:
        raise IllegalCombinationError(
            f"{where} reads the input of block {bad[0]}, '{target.name}' has blocks 0 to {target.num_layers - 1}"
        )
