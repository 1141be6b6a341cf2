"""The command line: parsing and printing, no logic. ``main`` is the entry point; importing it loads nothing heavy."""

from __future__ import annotations

import sys


def main() -> None:
    """Set the process up, run the command of ``sys.argv`` and exit with its code."""
    from outrider.cli.reexec import ensure_allocator

    ensure_allocator()
    from outrider.cli.app import run

    sys.exit(run(sys.argv[1:]))
