"""A folder of feature shards as one resumable run: its settings, its lock, and shards written as answers come in.

``collect.json`` holds what the answers depend on; a run that goes on with something else is refused by the setting's
name. What was done is read from the shards themselves. Held by one process at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from outrider.errors import RunError, UsageError
from outrider.models.whole_file import whole_file
from outrider.training.generate import Answer
from outrider.training.shards import Fingerprint, Shard, open_folder, shard_path, shard_paths, write_shard

SETTINGS = "collect.json"
MAX_SHARD_BYTES = 64 * 2**20
FLUSH_SECONDS = 300.0
"""A shard is written after this long even if it is small: what a kill may cost."""

GROWING = frozenset({"repeats"})
"""Settings that a later run may raise: what was done stays a part of it."""


class CollectFolder:
    """The shards of one run, opened for adding answers.

    Args:
        folder: made when it does not exist.
        fingerprint: of the target and its features.
        settings: what else the answers depend on, as JSON values.
        shard_bytes: of one shard at most (a single longer answer is a shard of its own).

    Attributes:
        shards: those that were there when the folder was opened.

    Raises:
        UsageError: when the folder belongs to a run with other settings or another target, or is in use.
        RunError: when it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        settings: Mapping[str, object],
        shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        self._shard_bytes = shard_bytes
        self._answers: list[Answer] = []
        self._tokens = 0
        self._since = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "collect.lock").open("a")
        except OSError as error:
            raise UsageError(f"cannot write to --output {folder}: {error.strerror or error}; choose another") from None
        try:
            hold(self._lock, folder)
            self._check_settings(json.loads(json.dumps(dict(settings))))
            for left in folder.glob("features-*.part"):
                left.unlink()
            self.shards: list[Shard] = open_folder(folder, fingerprint)[1] if shard_paths(folder) else []
        except BaseException:
            self._lock.close()
            raise
        last = shard_paths(folder)[-1:]
        self._next = int(last[0].stem.rpartition("-")[2]) + 1 if last else 0

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is on the disk after the next ``flush``, which happens as often as it must.

        Raises:
            RunError: when a shard cannot be stored.
        """
        per_token = self.fingerprint.bytes_per_token()
        if self._answers and (self._tokens + len(answer.tokens)) * per_token > self._shard_bytes:
            self.flush()
        self._answers.append(answer)
        self._tokens += len(answer.tokens)
        if time.monotonic() - self._since > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the answers kept so far as one shard.

        Raises:
            RunError: when it cannot be stored; nothing is left behind.
        """
        if self._answers:
            write_shard(shard_path(self.folder, self._next), self._answers, self.fingerprint)
            self._next += 1
            self._answers, self._tokens = [], 0
        self._since = time.monotonic()

    def __enter__(self) -> CollectFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Whole answers survive whatever ended the run, unless it was the disk."""
        try:
            if kind is None or not issubclass(kind, RunError):
                self.flush()
        finally:
            self._lock.close()

    def _check_settings(self, settings: dict[str, object]) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            if shard_paths(self.folder):
                raise UsageError(f"{self.folder} holds feature files but no {SETTINGS}; choose another --output")
            _write(path, settings)
            return
        try:
            found = json.loads(path.read_text())
            names = {*found, *settings}
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"cannot read {path}: {error}; choose another --output") from None
        for name in sorted(names):
            old, new = found.get(name), settings.get(name)
            may_grow = name in GROWING and isinstance(old, int) and isinstance(new, int) and old <= new
            if old != new and not may_grow:
                raise UsageError(
                    f"{self.folder} was begun with {name}={json.dumps(old)}, now it is {json.dumps(new)}; "
                    "use the same or another --output"
                )
        if found != settings:
            _write(path, settings)


def _write(path: Path, settings: Mapping[str, object]) -> None:
    with whole_file(path, "make room and run it again") as part:
        part.write_text(json.dumps(settings, indent=2) + "\n")


def hold(lock: IO[str], output: Path, option: str = "--output") -> None:
    """Lock, until the file is closed or the process ends; believed where files cannot be locked.

    Raises:
        UsageError: when another process holds it.
    """
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another process is writing to {output}; wait until it has finished, or choose another {option}"
        ) from None
    except OSError:
        return
