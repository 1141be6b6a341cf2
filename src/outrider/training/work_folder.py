"""A training's work folder, held by one process at a time, and whether its outcome can be stored where it is wanted.

Both are looked at before the first batch: a result that cannot be written, or two runs that overwrite each other's
checkpoints, would cost hours. Knows nothing of what is trained.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import UsageError
from outrider.training.collect_folder import hold

LOCK = "train.lock"


@contextmanager
def work_folder(folder: Path, output: Path) -> Iterator[None]:
    """Make ``folder`` and hold it; ``output`` will be written when the training is over.

    Raises:
        UsageError: when one of the two cannot be written, or another process trains in ``folder``.
    """
    _try_writing(output.absolute().parent, f"--output {output}")
    _try_writing(folder, f"--work-dir {folder}")
    with (folder / LOCK).open("a") as lock:
        hold(lock, folder, "--work-dir")
        yield


def _try_writing(folder: Path, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {what}: {error.strerror or error}; choose another") from None
