"""Checkpoints: whole or not there, the last two, of these settings only, never unpickled."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch

from outrider.errors import RunError, UsageError
from outrider.training import checkpoint as module
from outrider.training.checkpoint import (
    Checkpoint,
    check_settings,
    checkpoint_paths,
    latest_checkpoint,
    random_state,
    remove_checkpoints,
    restore_random_state,
    save_checkpoint,
)


def made(tokens: int) -> Checkpoint:
    tensors = {"model.weight": torch.full((3,), float(tokens)), "adam.weight.step": torch.tensor(2.0)}
    return Checkpoint({"row": 512, "lr": 1e-3, "features": [1, "final"]}, tokens, {"curves": [{"loss": 0.1}]}, tensors)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "work", made(5))
    found = latest_checkpoint(tmp_path / "work")
    assert found is not None
    assert (found.settings, found.tokens, found.state) == (made(5).settings, 5, made(5).state)
    assert {name: tensor.tolist() for name, tensor in found.part("model").items()} == {"weight": [5.0, 5.0, 5.0]}
    assert set(found.part("adam")) == {"weight.step"}
    assert latest_checkpoint(tmp_path / "none") is None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for tokens in (9, 10, 100, 2000):
        save_checkpoint(tmp_path, made(tokens))
    assert names(tmp_path) == ["checkpoint-00000000000100.safetensors", "checkpoint-00000000002000.safetensors"]
    remove_checkpoints(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["save_file", "replace"])
def test_a_full_disk_leaves_the_old_ones_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save_checkpoint(tmp_path, made(1))

    def full(*arguments: object, **_: object) -> None:
        Path(tmp_path / "checkpoint-00000000000002.part").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module if where == "save_file" else os, where, full)
    with pytest.raises(RunError, match=r"No space left on device; make room"):
        save_checkpoint(tmp_path, made(2))
    assert names(tmp_path) == ["checkpoint-00000000000001.safetensors"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.tokens == 1


def test_a_damaged_newest_one_falls_back(tmp_path: Path) -> None:
    for tokens in (1, 2):
        save_checkpoint(tmp_path, made(tokens))
    old, new = checkpoint_paths(tmp_path)
    new.write_bytes(new.read_bytes()[:50])
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.tokens == 1
    old.write_bytes(b"")
    with pytest.raises(RunError, match=r"cannot read the checkpoint .*--restart"):
        latest_checkpoint(tmp_path)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    (tmp_path / "checkpoint-00000000000001.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(RunError, match="cannot read the checkpoint"):
        latest_checkpoint(tmp_path)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("row", 256, "row=512, this one has row=256"), ("clip", 1.0, "clip=nothing, this one has clip=1.0")],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, value: object, said: str) -> None:
    settings = {"row": 512, "lr": 1e-3, "features": (1, "final")}
    check_settings(made(1).settings, settings, tmp_path)
    with pytest.raises(UsageError, match=said):
        check_settings(made(1).settings, settings | {name: value}, tmp_path)


def test_the_generator_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.rand(5)
    state = random_state()
    wanted = torch.rand(5)
    restore_random_state({name: tensor.clone() for name, tensor in state.items()})
    assert torch.equal(torch.rand(5), wanted)
