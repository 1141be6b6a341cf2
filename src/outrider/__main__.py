"""``python -m outrider`` is the command line."""

from __future__ import annotations

from outrider.cli import main

main()
