"""Packed rows read from feature shards, and the next batch prepared while the last one is trained on.

Batch ``number`` of epoch ``epoch`` is a function of the corpus, the seed and those two numbers: a ``Place`` is all that
a checkpoint needs to keep.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import RunError
from outrider.heads.config import Feature
from outrider.training.batch import Batch
from outrider.training.packing import Corpus, Piece, Row, pack, plan_epoch

OPEN_FILES = 64
"""Shards kept mapped; opening one parses its header."""


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the endless sequence of batches: the next one is batch ``number`` of epoch ``epoch``."""

    epoch: int = 0
    number: int = 0


class BatchReader:
    """Rows -> ``Batch`` on the CPU, features in float32. Used by one thread at a time."""

    def __init__(self, corpus: Corpus, features: Sequence[Feature], rows: int) -> None:
        self.corpus = corpus
        self.features = tuple(features)
        self.rows = rows
        self._files: OrderedDict[int, Any] = OrderedDict()

    def training(self, seed: int, place: Place) -> Iterator[tuple[Place, Batch]]:
        """Batches from ``place`` on, without end, each with the place of the one after it."""
        while True:
            plan = plan_epoch(self.corpus.training, self.corpus.row, seed, place.epoch)
            count = -(-len(plan) // self.rows)
            for number in range(place.number, count):
                after = Place(place.epoch, number + 1) if number + 1 < count else Place(place.epoch + 1)
                yield after, self.read(plan[number * self.rows : (number + 1) * self.rows])
            place = Place(place.epoch + 1)

    def validation(self, most_tokens: int) -> Iterator[Batch]:
        """The validation answers in the shards' order, about ``most_tokens`` of them at most."""
        chosen: list[Piece] = []
        tokens = 0
        for piece in self.corpus.validation:
            if tokens >= most_tokens:
                break
            chosen.append(piece)
            tokens += len(piece)
        plan = pack(chosen, self.corpus.row)
        for start in range(0, len(plan), self.rows):
            yield self.read(plan[start : start + self.rows])

    def read(self, rows: Sequence[Row]) -> Batch:
        """One batch [len(rows), row]: always of full width, for kernels are prepared once for each shape."""
        shape = (len(rows), self.corpus.row)
        size = self.corpus.fingerprint.hidden_size
        batch = Batch(
            tokens=torch.zeros(shape, dtype=torch.int64),
            answers=torch.zeros(shape, dtype=torch.bool),
            documents=torch.full(shape, -1),
            positions=torch.zeros(shape, dtype=torch.int64),
            features={name: torch.zeros((*shape, size)) for name in self.features},
            best=torch.full(shape, -1),
            log_sum=torch.zeros(shape),
        )
        for number, row in enumerate(rows):
            at = 0
            for document, piece in enumerate(row):
                self._place(batch, number, slice(at, at + len(piece)), document, piece)
                at += len(piece)
        return batch

    def _place(self, batch: Batch, row: int, to: slice, document: int, piece: Piece) -> None:
        shard, rows = self.corpus.shards[piece.shard], slice(piece.start, piece.stop)
        batch.tokens[row, to] = shard.tokens[rows]
        batch.answers[row, to.start + piece.prompt : to.stop] = True
        batch.documents[row, to] = document
        batch.positions[row, to] = torch.arange(len(piece))
        batch.best[row, to] = shard.best[rows]
        batch.log_sum[row, to] = shard.log_sum[rows]
        for name in self.features:
            batch.features[name][row, to] = self._hidden(piece.shard, name)[rows]

    def _hidden(self, shard: int, name: Feature) -> Any:
        if shard not in self._files:
            if len(self._files) == OPEN_FILES:
                self._files.popitem(last=False)
            path = self.corpus.shards[shard].path
            try:
                self._files[shard] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise RunError(f"cannot read {path} any more: {error}; training needs its data to the end") from None
        self._files.move_to_end(shard)
        return self._files[shard].get_slice(f"hidden.{name}")


class Prefetch:
    """Batches of ``source`` made by a thread of their own, ``depth`` ahead; closing it ends the thread.

    An error of the source is raised where the batch would have come out.
    """

    def __init__(self, source: Iterator[tuple[Place, Batch]], depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[Place, Batch] | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), name="batches", daemon=True)
        self._thread.start()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[tuple[Place, Batch]]:
        while True:
            found = self._queue.get()
            if isinstance(found, BaseException):
                raise found
            yield found

    def _fill(self, source: Iterator[tuple[Place, Batch]]) -> None:
        try:
            for found in source:
                if not self._put(found):
                    return
        except Exception as error:
            self._put(error)

    def _put(self, found: tuple[Place, Batch] | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(found, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False


def real_tokens(batch: Batch) -> int:
    """Tokens of a batch, padding aside."""
    return int((batch.documents >= 0).sum())
