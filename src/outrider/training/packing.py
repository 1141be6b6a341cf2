"""Which answers lie in which training row: feature shards -> rows of T tokens, several whole answers in each.

Everything here is a plan, a function of (answers, seed, epoch) alone: an interrupted run makes the same one again and
goes on at the same batch. The order is random within windows of neighbouring shards, so that a pass over the data
reads each file once. Knows lengths only; ``batches.py`` reads tokens and features.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import UsageError
from outrider.heads.config import Feature
from outrider.training.shards import Fingerprint, Shard, open_folder

WINDOW_SHARDS = 16
"""Shards whose answers are shuffled together (about 1 GB of the default model's features)."""

OPEN_ROWS = 64
"""Rows that an answer may still go to: more fill rows better, fewer keep a batch's answers near each other on disk."""

_SCALE = 1 << 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One answer in a row: rows ``start`` to ``stop`` of a shard, of which the first ``prompt`` are the prompt's."""

    shard: int
    start: int
    stop: int
    prompt: int

    def __len__(self) -> int:
        return self.stop - self.start


Row = list[Piece]
"""Answers that follow each other in one row."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Answers to train on and answers to validate on.

    Attributes:
        fingerprint: of all shards.
        shards: opened lazily, the folders' one after the other.
        training, validation: answers in the shards' order.
        row: tokens of a row; longer answers keep their last tokens.
        cut: answers that were longer.
        unanswered: answers left out since nothing of their answer is there.
    """

    fingerprint: Fingerprint
    shards: list[Shard]
    training: list[Piece]
    validation: list[Piece]
    row: int
    cut: int
    unanswered: int

    def counts(self) -> dict[str, int]:
        """Answers and tokens of both parts."""
        found = {}
        for name, pieces in (("training", self.training), ("validation", self.validation)):
            found[f"{name}_answers"] = len(pieces)
            found[f"{name}_tokens"] = sum(len(piece) for piece in pieces)
            found[f"{name}_answer_tokens"] = sum(len(piece) - piece.prompt for piece in pieces)
        return found

    def identity(self) -> str:
        """Hash of what was read, in which order: resumed runs must find the same."""
        digest = hashlib.sha256(self.fingerprint.to_json().encode())
        for shard in self.shards:
            digest.update(json.dumps([shard.starts, shard.prompts, shard.index]).encode())
            digest.update(shard.tokens.numpy().tobytes())
        return digest.hexdigest()[:24]

    def answer_counts(self, pieces: Sequence[Piece]) -> Tensor:
        """How often the target wrote each token in ``pieces``, int64 [vocabulary]."""
        total = torch.zeros(self.fingerprint.vocab_size, dtype=torch.int64)
        for piece in pieces:
            written = self.shards[piece.shard].tokens[piece.start + piece.prompt : piece.stop]
            total += torch.bincount(written.long(), minlength=len(total))
        return total


def open_corpus(
    folders: Sequence[Path],
    features: Sequence[Feature],
    row: int,
    validation: float = 0.02,
    seed: int = 0,
    whole_text: bool = False,
) -> Corpus:
    """Open feature folders of one fingerprint.

    Args:
        features: hidden states that they must hold.
        row: tokens of a training row.
        validation: share of the requests to keep for validation.
        seed: of the choice of these; which answers are kept depends on their prompts and on this only.
        whole_text: supervise the prompts of training answers too, behind what all texts begin with (the template's
            first words): the target's distribution at their rows is known as well, but the target did not write them.

    Raises:
        UsageError: when folders differ, lack a hidden state, or hold no token that the target wrote.
    """
    fingerprint, shards = open_folder(folders[0])
    for folder in folders[1:]:
        shards += open_folder(folder, fingerprint)[1]
    if missing := [str(name) for name in features if name not in fingerprint.features]:
        held = ", ".join(map(str, fingerprint.features))
        raise UsageError(
            f"{folders[0]} holds the hidden states {held}, but {', '.join(missing)} is needed; collect them again "
            f"with --features {','.join(map(str, features))}"
        )
    training: list[Piece] = []
    kept: list[Piece] = []
    template = shared_beginning(shards) if whole_text else 0
    cut = unanswered = 0
    for number, shard in enumerate(shards):
        for answer, prompt in enumerate(shard.prompts):
            start, stop = shard.starts[answer], shard.starts[answer + 1]
            if stop - start <= prompt:
                unanswered += 1
                continue
            over = max(0, stop - start - row)
            cut += over > 0
            is_kept = is_validation(shard.tokens[start : start + prompt], validation, seed)
            given = min(prompt, template) if whole_text and not is_kept else prompt
            (kept if is_kept else training).append(Piece(number, start + over, stop, max(0, given - over)))
    if not training:
        raise UsageError(f"{folders[0]} holds no token that the target wrote, so there is nothing to learn from")
    return Corpus(fingerprint, shards, training, kept, row, cut, unanswered)


def shared_beginning(shards: Sequence[Shard]) -> int:
    """Tokens that all texts begin with."""
    texts = [shard.tokens[shard.span(answer)] for shard in shards for answer in range(len(shard))]
    shared = texts[0]
    for text in texts:
        size = min(len(shared), len(text))
        differs = torch.nonzero(shared[:size] != text[:size])
        shared = shared[: int(differs[0]) if len(differs) else size]
    return len(shared)


def is_validation(prompt: Tensor, share: float, seed: int = 0) -> bool:
    """Whether answers to ``prompt`` (int32 [n]) are kept for validation: the same whatever else is in the data.

    The prompt decides, not the request's number: repeated prompts would otherwise be on both sides.
    """
    digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8, salt=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < share * _SCALE


def plan_epoch(pieces: Sequence[Piece], row: int, seed: int, epoch: int) -> list[Row]:
    """Rows of one pass over ``pieces``, each answer once, in an order that is a function of the arguments."""
    order = random.Random(f"{seed}:{epoch}")
    shards = sorted({piece.shard for piece in pieces})
    order.shuffle(shards)
    window_of = {shard: place // WINDOW_SHARDS for place, shard in enumerate(shards)}
    windows: list[list[Piece]] = [[] for _ in range(-(-len(shards) // WINDOW_SHARDS))]
    for piece in pieces:
        windows[window_of[piece.shard]].append(piece)
    for window in windows:
        order.shuffle(window)
    return pack([piece for window in windows for piece in window], row)


def pack(pieces: Sequence[Piece], row: int) -> list[Row]:
    """Put answers into rows of ``row`` tokens: each goes to the first open row with room for it."""
    done: list[Row] = []
    rows: list[Row] = []
    room: list[int] = []
    for piece in pieces:
        place = next((i for i, left in enumerate(room) if left >= len(piece)), None)
        if place is None:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                done.append(rows.pop(fullest))
                room.pop(fullest)
            place = len(rows)
            rows.append([])
            room.append(row)
        rows[place].append(piece)
        room[place] -= len(piece)
    return done + rows
