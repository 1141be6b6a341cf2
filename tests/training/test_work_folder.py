"""A work folder is one process's, and what could not be stored in the end is refused at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import UsageError
from outrider.training.work_folder import LOCK, work_folder


def test_one_training_at_a_time(tmp_path: Path) -> None:
    work, output = tmp_path / "work", tmp_path / "new" / "head"
    with (
        work_folder(work, output),
        pytest.raises(UsageError, match=r"another process is writing to .*work.*another --work-dir"),
        work_folder(work, output),
    ):
        pass
    with work_folder(work, output):  # free again
        assert [path.name for path in work.iterdir()] == [LOCK]
    assert list(output.parent.iterdir()) == []


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "x"
    with (
        pytest.raises(UsageError, match=r"cannot write to --output .*file/x: .*choose another"),
        work_folder(tmp_path / "work", below),
    ):
        pass
    assert not (tmp_path / "work").exists()
    with pytest.raises(UsageError, match=r"cannot write to --work-dir .*file/x"), work_folder(below, tmp_path / "head"):
        pass
