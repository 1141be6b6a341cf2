"""Feature files: answered prompts with the target's hidden states, in safetensors shards under one fingerprint.

A shard holds whole answers, one after the other: ``tokens`` int32 [n], ``starts`` int64 [answers + 1], ``prompts``
int32 [answers] (prompt lengths), ``index`` int64 [answers] (which request), ``temperature`` float32 [answers],
``finished`` bool [answers], ``best`` int32 and ``log_sum`` float32 [n] (as ``Answer`` says) and one matrix
``hidden.NAME`` [n, hidden_size] for each state. A shard is written under a temporary name and renamed when it is whole;
its name counts up, and a run that was killed goes on behind the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import UsageError
from outrider.models.whole_file import whole_file
from outrider.training.generate import Answer, Feature

FINGERPRINT = "outrider.features"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What feature files depend on; files that differ in any of it are never mixed.

    Attributes:
        target: ``models/fingerprint.py`` of the target.
        tokenizer: ``Tokenizer.fingerprint``.
        template: SHA-256 of the chat template.
        features: names of the hidden states.
        hidden_size, vocab_size: of the target.
        dtype: of the hidden states.
    """

    target: str
    tokenizer: str
    template: str
    features: tuple[Feature, ...]
    hidden_size: int
    vocab_size: int
    dtype: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields in which two fingerprints differ."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if mine[name] != theirs[name]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        values = json.loads(text)
        return cls(**{**values, "features": tuple(values["features"])})

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a shard."""
        width = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        return 12 + len(self.features) * self.hidden_size * width


@dataclass(frozen=True, slots=True)
class Shard:
    """One feature file, opened lazily: features of an answer are read when asked for."""

    path: Path
    tokens: Tensor
    best: Tensor
    log_sum: Tensor
    starts: list[int]
    prompts: list[int]
    index: list[int]
    temperature: list[float]
    finished: list[bool]

    def __len__(self) -> int:
        return len(self.prompts)

    def span(self, answer: int) -> slice:
        """Rows of one answer."""
        return slice(self.starts[answer], self.starts[answer + 1])


def shard_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` lies."""
    return folder / f"features-{number:05d}.safetensors"


def write_shard(path: Path, answers: Sequence[Answer], fingerprint: Fingerprint) -> None:
    """Write whole answers to ``path``; it exists only when everything is on the disk.

    Raises:
        RunError: when it cannot be stored (no room); nothing is left behind.
    """
    starts = torch.zeros(len(answers) + 1, dtype=torch.int64)
    starts[1:] = torch.cumsum(torch.tensor([len(a.tokens) for a in answers]), 0)
    tensors = {
        "tokens": torch.tensor([t for a in answers for t in a.tokens], dtype=torch.int32),
        "starts": starts,
        "prompts": torch.tensor([len(a.request.prompt) for a in answers], dtype=torch.int32),
        "index": torch.tensor([a.request.index for a in answers], dtype=torch.int64),
        "temperature": torch.tensor([a.request.temperature for a in answers], dtype=torch.float32),
        "best": torch.cat([a.best for a in answers]),
        "log_sum": torch.cat([a.log_sum for a in answers]),
        "finished": torch.tensor([a.is_finished for a in answers]),
    }
    dtype = getattr(torch, fingerprint.dtype)
    for name in fingerprint.features:
        tensors[f"hidden.{name}"] = torch.cat([a.features[name] for a in answers]).to(dtype)
    with whole_file(path, "make room and run the same command again", is_synced=True) as part:
        save_file(tensors, part, metadata={FINGERPRINT: fingerprint.to_json()})


def read_fingerprint(path: Path) -> Fingerprint:
    """Of one shard.

    Raises:
        UsageError: when the file is not a shard of ours.
    """
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(FINGERPRINT)
        if text is None:
            raise ValueError("it has no fingerprint")
        return Fingerprint.from_json(text)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a feature file of 'outrider train collect': {error}") from None


def read_shard(path: Path) -> Shard:
    """Everything of a shard but its features.

    Raises:
        UsageError: when the file is not a shard of ours.
    """
    read_fingerprint(path)
    try:
        with safe_open(path, "pt") as file:
            rows = {name: file.get_tensor(name) for name in ("tokens", "best", "log_sum")}
            part = {name: file.get_tensor(name) for name in ("starts", "prompts", "index")}
            rest = {name: file.get_tensor(name).tolist() for name in ("temperature", "finished")}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is not a whole feature file: {error}; delete it and collect again") from None
    lists = {name: tensor.tolist() for name, tensor in part.items()}
    return Shard(path, **rows, **lists, **rest)


def read_features(shard: Shard, names: Sequence[Feature], rows: slice) -> dict[Feature, Tensor]:
    """Rows of some hidden states, [rows, hidden_size] each."""
    with safe_open(shard.path, "pt") as file:
        return {name: file.get_slice(f"hidden.{name}")[rows] for name in names}


def shard_paths(folder: Path) -> list[Path]:
    """Shards of a folder, in order."""
    return sorted(folder.glob("features-*.safetensors"))


def open_folder(folder: Path, fingerprint: Fingerprint | None = None) -> tuple[Fingerprint, list[Shard]]:
    """All shards of a folder, of one fingerprint.

    Raises:
        UsageError: when there are none, or they differ among themselves or from ``fingerprint``, naming what differs.
    """
    paths = shard_paths(folder)
    if not paths:
        raise UsageError(f"{folder} holds no feature files; make some with 'outrider train collect --output {folder}'")
    found = fingerprint or read_fingerprint(paths[0])
    for path in paths:
        if different := found.differences(read_fingerprint(path)):
            raise UsageError(f"{path} was made with another {' and '.join(different)}; use one folder for each target")
    return found, [read_shard(path) for path in paths]


def describe(shards: Sequence[Shard]) -> Mapping[str, int]:
    """Answers, tokens and answer tokens in all."""
    tokens = sum(shard.starts[-1] for shard in shards)
    prompts = sum(sum(shard.prompts) for shard in shards)
    return {"answers": sum(len(shard) for shard in shards), "tokens": tokens, "answer_tokens": tokens - prompts}


def iterate(shards: Sequence[Shard]) -> Iterator[tuple[Shard, int]]:
    """Every answer as (shard, number in it)."""
    for shard in shards:
        for answer in range(len(shard)):
            yield shard, answer
