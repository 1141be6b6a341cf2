"""Every head format that can be named, in plain sight: name -> "module:Class", imported when used."""

from __future__ import annotations

import importlib
from pathlib import Path

from outrider.errors import ModelFileError, UnknownNameError
from outrider.heads.formats.base import HeadFormat
from outrider.heads.formats.raw import RawHead, open_raw

AUTO = "auto"

FORMATS = {
    "outrider": "outrider.heads.formats.own:OwnFormat",
    "medusa": "outrider.heads.formats.medusa:OriginalMedusa",
    "vllm-medusa": "outrider.heads.formats.medusa:VllmMedusa",
    "hydra": "outrider.heads.formats.hydra:OriginalHydra",
    "eagle": "outrider.heads.formats.eagle:OriginalEagle",
    "eagle3": "outrider.heads.formats.eagle3:OriginalEagle3",
    "sglang": "outrider.heads.formats.eagle3:SglangEagle3",
    "speculators": "outrider.heads.formats.speculators:Speculators",
}


def head_format(name: str) -> HeadFormat:
    """The format called ``name``.

    Raises:
        UnknownNameError: listing the known formats.
    """
    if name not in FORMATS:
        raise UnknownNameError("head format", name, FORMATS)
    module, _, attribute = FORMATS[name].partition(":")
    found: type[HeadFormat] = getattr(importlib.import_module(module), attribute)
    return found()


def detect(directory: Path, raw: RawHead | None = None) -> HeadFormat:
    """The format of a head's directory or file, by its configuration and tensor names.

    Raises:
        ModelFileError: it looks like none of them.
    """
    found = open_raw(directory) if raw is None else raw
    for name in FORMATS:
        candidate = head_format(name)
        if candidate.detect(found):
            return candidate
    first = ", ".join(sorted(found.names)[:3])
    raise ModelFileError(
        f"'{directory}' looks like no head format that is known here (its tensors start with {first}); "
        f"name it with --from: {', '.join(FORMATS)}"
    )
