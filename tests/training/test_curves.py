"""Curve files and their picture."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from outrider.errors import RunError, UsageError
from outrider.training.curves import draw_curves, read_curves, write_curves

ROWS = [
    {"kind": "training", "tokens": 10, "loss": 3.0, "top1": [0.1], "acceptance": 1.1},
    {"kind": "training", "tokens": 20, "loss": 2.0, "top1": [0.3, 0.1], "acceptance": 1.3},
    {"kind": "validation", "tokens": 20, "loss": 2.5, "top1": [0.2, 0.1], "overlap": [0.4, 0.3]},
]


def test_rows_come_back(tmp_path: Path) -> None:
    path = write_curves(tmp_path / "new", ROWS)
    assert path.name == "curves.jsonl"
    assert read_curves(path) == ROWS
    assert [p.name for p in path.parent.iterdir()] == ["curves.jsonl"]


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", "[1]\n", "3\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(UsageError, match="is not a curve file"):
        read_curves(tmp_path / "x")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_curves(tmp_path, ROWS[:1])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match="No space left"):
        write_curves(tmp_path, ROWS)
    assert read_curves(tmp_path / "curves.jsonl") == ROWS[:1]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match=r"outrider\[train\]"):
        draw_curves(ROWS, tmp_path / "x.png", "title")
    assert list(tmp_path.iterdir()) == []


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_curves(ROWS, tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
