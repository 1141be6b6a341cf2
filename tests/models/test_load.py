"""What a user types -> a location -> a checkpoint."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from tiny_checkpoints import write_gguf, write_pretrained

from outrider.errors import DownloadError, ModelFileError, UnknownNameError
from outrider.models import load, store
from outrider.models.gguf import GGUFCheckpoint
from outrider.models.load import ModelLocation, open_checkpoint, resolve
from outrider.models.pretrained import PretrainedCheckpoint


def test_files_and_directories(tmp_path: Path) -> None:
    write_pretrained(tmp_path / "hf")
    (tmp_path / "one").mkdir()
    write_gguf(tmp_path / "one" / "m.gguf")
    location = resolve(str(tmp_path / "hf"))
    assert location == ModelLocation("pretrained", tmp_path / "hf", str(tmp_path / "hf"))
    assert isinstance(open_checkpoint(location), PretrainedCheckpoint)
    for spec in (tmp_path / "one" / "m.gguf", tmp_path / "one"):
        location = resolve(str(spec))
        assert (location.kind, location.path) == ("gguf", tmp_path / "one" / "m.gguf")
        assert isinstance(open_checkpoint(location), GGUFCheckpoint)


def test_catalogue_names_are_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "pull", lambda name, progress=None: tmp_path / f"{name}.gguf")
    assert resolve("smollm2-135m") == ModelLocation("gguf", tmp_path / "smollm2-135m.gguf", "smollm2-135m")


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repository: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name-1.5") == ModelLocation("pretrained", tmp_path, "org/name-1.5")
    assert asked[0][0] == "org/name-1.5"
    assert not any(p.endswith((".bin", ".py", "*")) for p in asked[0][1] if p != "tokenizer*")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("long\nstory"), "HF_HUB_OFFLINE"),
        (OfflineModeIsEnabled("offline\nmode"), "offline"),
        (OSError("disk\nfull"), "disk"),
    ],
)
def test_hub_failures_are_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(repository: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match=message) as info:
        resolve("some-org/some-model")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("spec", ["./absent", "/absent/dir", "../absent", "absent.gguf", "~/absent/x"])
def test_absent_paths(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="no model at"):
        resolve(spec)


@pytest.mark.parametrize("spec", ["smolm2-135m", "", "a/b/c", "name with spaces", "nul\0byte", "x" * 5000])
def test_unknown_names(spec: str) -> None:
    with pytest.raises(UnknownNameError, match=r"smollm2-135m"):
        resolve(spec)


def test_close_match_is_offered() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2-135m'"):
        resolve("smollm-135m")


def test_ambiguous_and_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"neither a config\.json nor"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match="give its directory"):
        resolve(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelFileError, match="only 0 bytes"):
        open_checkpoint(load.resolve(str(tmp_path / "a.gguf")))
