"""Files of answers: a row names its prompt by index and hash, and the settings that it was made with."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from outrider.errors import RunError, UsageError
from outrider.text.prompt_file import PromptRow


class AnswerFile:
    """The answers written so far; a rerun continues where they end. Held by one process at a time.

    Args:
        path: JSON lines; need not exist.
        settings: what the answers depend on; rows made with other settings are not mixed with new ones.

    Raises:
        UsageError: when the file cannot be opened, is being written by another process, holds something else, or
            answers of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self.done: set[tuple[int, str]] = set()
        try:
            self._stream = _open_alone(path)
            try:
                if path.is_file():  # not a device or a pipe
                    self._read()
            except BaseException:
                self._stream.close()
                raise
        except OSError as error:
            raise UsageError(f"cannot write to --output {path}: {error.strerror or error}; choose another") from None

    def _read(self) -> None:
        data = self.path.read_bytes()
        complete = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:complete].splitlines(), 1):
            self.done.add(self._check(line, number))
        if complete < len(data):  # a run that was killed tore its last line
            os.truncate(self.path, complete)

    def _check(self, line: bytes, number: int) -> tuple[int, str]:
        try:
            row = json.loads(line)
            key, settings = (int(row["index"]), str(row["prompt_sha256"])), dict(row["settings"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{self.path}, line {number} was not written by 'outrider generate'; choose another --output"
            ) from None
        names = {*settings, *self._settings}
        different = sorted(name for name in names if settings.get(name) != self._settings.get(name))
        if different:
            name = different[0]
            raise UsageError(
                f"{self.path} holds answers made with {name}={settings.get(name)!r}, now it is "
                f"{self._settings.get(name)!r}; use the same settings or another --output"
            )
        return key

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row and make sure that it is on the disk.

        Raises:
            RunError: when it cannot be stored; a rerun continues after the last whole row.
        """
        try:
            self._stream.write(json.dumps({**row, "settings": self._settings}, ensure_ascii=False) + "\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path}: {error.strerror or error}; make room and run the same command again"
            ) from None

    def close(self) -> None:
        """Close the file, and remove it when it is empty: a run that failed early leaves nothing behind."""
        with suppress(OSError):  # before the lock goes: another run may be waiting to fill the file
            if self.path.is_file() and self.path.stat().st_size == 0:
                self.path.unlink()
        with suppress(OSError):  # what could not be flushed was reported by ``write``
            self._stream.close()


def _open_alone(path: Path) -> TextIO:
    """Open for appending and lock; the lock ends with the file or its process, however that ends."""
    while True:
        stream = path.open("a", encoding="utf-8")
        opened = os.fstat(stream.fileno())
        if not stat.S_ISREG(opened.st_mode):
            return stream
        if not _lock(stream):
            stream.close()
            raise UsageError(
                f"another process is writing to --output {path}; wait until it has finished, or choose another file"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(opened, path.stat()):
                return stream
        stream.close()  # a run that ended without an answer removed the file between our opening and locking it


def _lock(stream: TextIO) -> bool:
    """Whether nobody else holds the file; where files cannot be locked (Windows, some network disks) it is believed."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def pending(rows: Sequence[PromptRow], done: set[tuple[int, str]]) -> list[PromptRow]:
    """Rows without an answer."""
    return [row for row in rows if (row.index, row.digest) not in done]
