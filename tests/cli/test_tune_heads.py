"""``outrider tune heads``: from a head file and feature files to a tree that ``--shape`` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.tiny_heads import head_file
from outrider.cli.app import run
from outrider.trees.shapes.from_accuracy import paths_from_accuracy, paths_text
from outrider.trees.shapes.static import StaticOptions
from training.tiny_llamas import random_llama, save_llama, target_on_disk, tiny_config, write_features


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, features that it wrote, and heads of three methods."""
    folder = tmp_path_factory.mktemp("heads")
    target = target_on_disk(folder / "target")
    write_features(folder / "data", target)
    for method in ("medusa", "hydra", "eagle"):
        head_file(folder / method, method, target.model)
    save_llama(folder / "other", random_llama(tiny_config(hidden_size=16), 1))
    return folder


def tune(folder: Path, head: str, *more: str, model: str = "target") -> int:
    return run([
        "tune", "heads", "--head", str(folder / head), "--data", str(folder / "data"), "--model", str(folder / model),
        "--dtype", "float32", *more,
    ])  # fmt: skip


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_a_tree_for_the_shape(method: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(folder, method, "--budget", "9", "--ranks", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    shares = found["accuracy"]
    assert len(shares) == 4
    assert all(len(head) == 4 and 0.0 <= sum(head) <= 1.0 for head in shares)
    assert found["positions"][0] == 8 * 24  # every token of every answer is some row's label
    chosen = paths_from_accuracy(shares, 9)
    assert found["shape"] == f"static:{paths_text(chosen)}"
    options = StaticOptions.model_validate({"paths": found["shape"].removeprefix("static:")})
    assert options.structure.size == len(chosen) > 0
    assert found["predicted_tokens_per_step"] > 1.0


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(folder, "medusa", "--budget", "5", "--tokens", "30") == 0
    text = capsys.readouterr().out
    assert "tokens per step if heads were independent" in text
    assert "--shape static:0" in text


@pytest.mark.parametrize(
    ("head", "model", "message"),
    [
        ("eagle", "target", "a head of eagle; heads that guess each depth"),
        ("medusa", "other", "hidden size 32"),
        ("none", "target", "none"),
    ],
)
def test_mistakes(head: str, model: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(folder, head, model=model) != 0
    assert message in capsys.readouterr().err


def test_features_of_another_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = target_on_disk(tmp_path / "target", seed=3)
    data = write_features(tmp_path / "data", other)
    command = [
        "tune",
        "heads",
        "--head",
        str(folder / "medusa"),
        "--data",
        str(data),
        "--model",
        str(folder / "target"),
    ]
    assert run(command) == 2
    assert "was collected from another model" in capsys.readouterr().err
