"""Starts Python again, once, with allocator settings that torch needs on a CPU (design.md, section 5).

glibc gives large blocks back to the system and faults them in again page by page at the next forward pass, which costs
a factor of two and more. The settings are read before Python starts, hence the re-exec. Only the command line does
this, only with glibc on Linux, and variables that the user has set are left as they are.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
}
MARKER = "OUTRIDER_REEXEC"
"""Set in the environment after the re-exec so that it happens once; set it yourself to prevent it."""


def ensure_allocator() -> None:
    """Replace this process by the same one with ``SETTINGS`` in its environment; returns when there is no need to."""
    environment = reexec_environment(os.environ, is_glibc())
    if environment is None or "torch" in sys.modules or not sys.executable:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError:
        return  # slower, not wrong


def reexec_environment(environment: Mapping[str, str], glibc: bool) -> dict[str, str] | None:
    """The environment to start again with, or ``None`` when nothing is to be done."""
    if not glibc or MARKER in environment or is_active(environment):
        return None
    return {**SETTINGS, **environment, MARKER: "1"}


def is_active(environment: Mapping[str, str]) -> bool:
    """Whether every setting has some value (ours or the user's)."""
    return all(name in environment for name in SETTINGS)


def is_glibc() -> bool:
    """Whether this is Linux with glibc, whose allocator reads the settings."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
