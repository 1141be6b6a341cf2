"""``outrider convert``: what it prints and writes, in both directions; nothing is left behind when it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import typer

from heads.formats import public_files as files
from outrider.cli import app, convert
from outrider.errors import RunError
from outrider.heads.build import untrained_head
from outrider.heads.eagle3 import Eagle3
from outrider.heads.file import load_head, save_head
from outrider.heads.formats import output
from outrider.heads.formats.registry import FORMATS, head_format
from outrider.models.toy import ToyModel
from outrider.text.toy_tokenizer import toy_tokenizer


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as ``app`` has it, or will have it."""
    if not any(command.name == "convert" for command in app.app.registered_commands):
        extra = typer.Typer()
        convert.register(extra)
        monkeypatch.setattr(app.app, "registered_commands", app.app.registered_commands + extra.registered_commands)


def run(*arguments: object) -> int:
    return app.run(["convert", *map(str, arguments)])


@pytest.fixture
def toy_head(tmp_path: Path) -> Path:
    """A head file of ours for the toy model, every second token in its vocabulary."""
    target = ToyModel(vocab_size=toy_tokenizer().vocab_size)
    network = untrained_head("eagle3", target, draft_vocab_size=20, features=(1, 2, 3))
    network.draft_ids = torch.arange(20) * 2
    save_head(tmp_path / "toy.safetensors", network)
    return tmp_path / "toy.safetensors"


def test_a_public_head_becomes_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = files.write(tmp_path / "public", *files.sglang())
    assert run(source, tmp_path / "new" / "head.safetensors") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "method      eagle3 (from sglang)",
        "size        hidden 16, 0.00 million numbers",
        "reads       input of block 2, input of block 5, input of block 7",
        "guesses     12 of 40 tokens",
        "flags       none",
        f"written to  {tmp_path / 'new' / 'head.safetensors'}",
    ]
    assert f"--drafter eagle3:head={tmp_path / 'new' / 'head.safetensors'}" in captured.err
    assert load_head(tmp_path / "new" / "head.safetensors").config.features == (2, 5, 7)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["head.safetensors"]


@pytest.mark.parametrize("name", ["eagle3", "speculators", "sglang"])
def test_ours_becomes_public_and_comes_back(name: str, toy_head: Path, tmp_path: Path) -> None:
    assert run(toy_head, tmp_path / name, "--to", name, "--target", "toy", "--dtype", "float32") == 0
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["config.json", "model.safetensors"]
    assert run(tmp_path / name, tmp_path / "back", "--target", "toy", "--method", "eagle3") == 0
    before, after = load_head(toy_head), load_head(tmp_path / "back" / "head.safetensors")
    assert isinstance(after, Eagle3)
    assert after.config.features == (1, 2, 3)
    assert after.config.tokenizer != ""
    for key, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[key])


def test_a_weight_file_alone_and_a_named_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, config = files.medusa()
    files.write(tmp_path, tensors, config, "medusa_lm_head.pt")
    assert run(tmp_path / "medusa_lm_head.pt", tmp_path / "a", "--from", "medusa") == 0
    assert "guesses     40 tokens" in capsys.readouterr().out
    assert run(tmp_path / "a", tmp_path / "b", "--to", "vllm-medusa") == 0
    assert run(tmp_path / "a", tmp_path / "c", "--from", "hydra") == 1
    assert "has no block 'hydra_mlp.0.0'; it is no Hydra head" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "medusa"], "is a eagle3 head, not medusa"),
        (["--to", "nothing"], "unknown head format 'nothing'"),
        (["--to", "vllm-medusa"], "holds heads of medusa, not eagle3"),
        (["--to", "hydra"], "can be read, not written"),
        (["--to", "speculators"], "name the model that the head is for: --target"),
        (["--target", "toy"], "hidden size 16, 'toy' has 8"),
    ],
)
def test_refusals_leave_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = files.write(tmp_path / "public", *files.sglang())
    assert run(source, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["public"]


def test_destinations_that_exist_or_have_the_wrong_form(
    toy_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(toy_head, toy_head) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(toy_head, tmp_path / "x.safetensors", "--to", "sglang") == 2
    assert "is a directory of files" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(toy_head, tmp_path / "file" / "x", "--to", "sglang") == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(
    toy_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "save_file", full)
    assert run(toy_head, tmp_path / "out", "--to", "sglang") == RunError.exit_code
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["toy.safetensors"]


def test_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert set(FORMATS) <= words
    assert {name for name in FORMATS if head_format(name).writes} <= words
