"""Every error that Outrider raises on purpose, as one tree.

    OutriderError
    ├── UsageError               the request itself is wrong              (exit code 2)
    │   ├── UnknownNameError     a name that no registry or store knows
    │   ├── InvalidOptionError   an option or parameter outside its range
    │   ├── IllegalCombinationError  parts that are not exact (or not able) together
    │   └── ContextLengthError   more tokens than the model's context holds
    └── RunError                 the request is fine, the world is not    (exit code 1)
        ├── ModelFileError       corrupt, truncated, unsafe or incomplete weight file
        ├── UnsupportedModelError    an architecture or state that cannot be served exactly
        ├── DownloadError        no network, wrong checksum, no disk space
        └── CacheRollbackError   a cache was asked for entries that it no longer holds

Messages say what was asked, why it cannot be, and what to do. The command line prints them as one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of all deliberate errors. ``exit_code`` is what the command line returns."""

    exit_code = 1


class UsageError(OutriderError):
    """The user asked for something that cannot be; nothing was started."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is not registered; the message lists the known ones, the closest match and ``otherwise``."""

    def __init__(self, what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        super().__init__(f"unknown {what} '{name}'{hint}; known: {', '.join(known)}{otherwise}")


class InvalidOptionError(UsageError):
    """An option's value is outside what is allowed."""


class IllegalCombinationError(UsageError):
    """Parts that would not be exact, or cannot work, together."""


class ContextLengthError(UsageError):
    """A prompt that leaves no room in the model's context."""


class RunError(OutriderError):
    """Something failed while doing a legitimate request."""


class ModelFileError(RunError):
    """A weight file is corrupt, truncated, unsafe or lacks a tensor."""


class UnsupportedModelError(RunError):
    """A model that Outrider cannot run exactly (for example: state that cannot be rolled back)."""


class DownloadError(RunError):
    """A model could not be fetched."""


class CacheRollbackError(RunError):
    """A key/value cache cannot return to the state asked for."""
