"""Files that appear whole or not at all: written under a temporary name beside the final one, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import RunError


@contextmanager
def whole_file(path: Path, advice: str, is_synced: bool = False, what: str = "") -> Iterator[Path]:
    """Gives the temporary name to write to; when the block ends well, that file becomes ``path``.

    Args:
        advice: how the user gets on when it cannot be stored.
        is_synced: wait for the disk before renaming, else a power cut could leave the new name with nothing behind it.
        what: what the file is, for the message.

    Raises:
        RunError: when it cannot be stored; the temporary file is gone and what was at ``path`` stays.
    """
    part = path.with_suffix(".part")
    try:
        yield part
        if is_synced:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"cannot write {what}{path}: {reason}; {advice}") from None
