"""One head's files -> another format, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import InvalidOptionError, RunError
from outrider.heads.file import HEAD_FILE
from outrider.heads.formats.base import Network, TargetFacts
from outrider.heads.formats.own import OwnFormat
from outrider.heads.formats.raw import open_raw
from outrider.heads.formats.registry import AUTO, detect, head_format

_ENDING = ".safetensors"


@dataclass(frozen=True, slots=True)
class Converted:
    """What was read, in which format it lay, and where it was written."""

    network: Network
    source_format: str
    written: Path


def convert(
    source: Path,
    destination: Path,
    from_format: str,
    to_format: str,
    target: TargetFacts | None,
    method: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Converted:
    """Read a head, write it in another format.

    Args:
        source: directory or weight file.
        destination: a directory that does not exist; for Outrider's format also a ``.safetensors`` file.
        from_format, to_format: registered names; ``auto`` looks at the files.
        target: the head's target, for what the files leave open.
        method: what the head must be; ``None`` accepts any.
        dtype: of the floating-point tensors that are written.

    Raises:
        InvalidOptionError: the destination exists, or the head is of another method.
        UsageError, RunError: as the formats say.
    """
    writer = head_format(to_format)
    is_file = isinstance(writer, OwnFormat) and destination.suffix == _ENDING
    if destination.exists():
        raise InvalidOptionError(f"'{destination}' exists already; remove it or name another destination")
    if destination.suffix == _ENDING and not is_file:
        raise InvalidOptionError(f"the format '{to_format}' is a directory of files; name one, not '{destination}'")
    raw = open_raw(source)
    reader = detect(source, raw) if from_format == AUTO else head_format(from_format)
    network = reader.read(raw, target)
    if method not in (None, network.config.method):
        raise InvalidOptionError(f"'{source}' is a {network.config.method} head, not {method}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=destination.parent) as temporary:
            folder = Path(temporary) / "head"
            folder.mkdir(mode=0o755)
            writer.write(network, folder, target, dtype)
            os.replace(folder / HEAD_FILE if is_file else folder, destination)
    except (OSError, shutil.Error) as error:
        raise RunError(f"cannot write '{destination}': {error}; make room or choose another place") from error
    return Converted(network, reader.name, destination)
