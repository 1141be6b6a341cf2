"""Modules stay readable: none over 400 lines, median about 120."""

from __future__ import annotations

import statistics
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "outrider"


def test_module_sizes(capsys: object) -> None:
    sizes = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert len(sizes) > 20
    too_long = {name: size for name, size in sizes.items() if size > 400}
    assert not too_long
    assert statistics.median(size for size in sizes.values() if size > 5) <= 140


def test_no_grab_bag_names() -> None:
    banned = ("utils", "common", "helpers", "misc", "_v2")
    assert [p.name for p in PACKAGE.rglob("*.py") if any(word in p.stem for word in banned)] == []
