"""``outrider train small-model`` and ``train medusa2`` from the command line, on tiny models; and models that ship."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from outrider.cli.app import run
from outrider.config import EngineConfig
from outrider.engine.loading import LoadedModel, load_model
from outrider.models import shipped
from outrider.models.fingerprint import fingerprint
from outrider.text.vocabulary import vocabulary_hash
from training.synthetic_shards import write_data
from training.tiny_llamas import letters, random_llama, save_llama, target_on_disk, tiny_config, write_features

pytestmark = pytest.mark.usefixtures("pictures")

SMALL = ["--hidden", "16", "--layers", "1", "--heads", "2", "--intermediate", "24", "--context", "64"]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A target in ``target``, its answers in ``features``; both are the working directory's."""
    monkeypatch.chdir(tmp_path)
    made = target_on_disk(tmp_path / "target")
    write_features(tmp_path / "features", made, answers=40, length=16)
    return made


def train(command: str, output: str, *more: str) -> int:
    shared = ["--data", "features", "--model", "target", "--output", output, "--dtype", "float32", "--threads", "1"]
    lengths = ["--row", "32", "--batch-tokens", "128", "--vocabulary", "30"]
    more = more if "--tokens" in more else (*more, "--tokens", "2k")
    return run(["train", command, *shared, *lengths, *more])


def test_two_models_boosted_and_merged(target: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("small-model", "one", "--validation", "0.2", *SMALL) == 0
    printed = capsys.readouterr()
    assert "one: 0.0 MB" in printed.out
    assert "simulated acceptance length" in printed.out
    assert "--drafter small_model --draft-model one" in printed.err
    assert Path("one.curves.jsonl").is_file()
    assert train("small-model", "two", "--boost-against", "one", *SMALL) == 0
    assert "earlier models agree" in capsys.readouterr().err
    card = json.loads(Path("two/card.json").read_text())
    assert card["boosted_against"] == ["one"]
    half = card["data"]["training_answers"]
    assert 0 < half < json.loads(Path("one/card.json").read_text())["data"]["training_answers"]
    drafter = "ensemble:small_model@widths:2,1+small_model@widths:2,1"
    parts = ["--drafter", drafter, "--draft-model", "one,two", "--no-adaptive", "--dtype", "float32"]
    asked = ["generate", "t3t4t5", "--model", "target", "--max-new-tokens", "12", "--raw", "--ignore-eos"]
    assert run([*asked, *parts]) == 0
    merged = capsys.readouterr().out
    assert run([*asked, "--drafter", "none", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == merged


def test_the_ranking_is_kept_for_the_next_start(target: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("small-model", "one", *SMALL) == 0
    capsys.readouterr()
    for _ in range(2):
        assert train("small-model", "two", "--boost-against", "one", "--boost-weight", "3", *SMALL) == 0
    assert capsys.readouterr().err.count("earlier models, to boost") == 1


def test_training_goes_on_from_a_model(target: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("small-model", "one", *SMALL) == 0
    assert train("small-model", "more", "--init", "one", "--tokens", "256") == 0
    sizes = [json.loads(Path(name, "card.json").read_text())["sizes"] for name in ("one", "more")]
    assert sizes[0] == sizes[1]  # the model's, not the defaults
    assert train("small-model", "one", "--lr", "0.001", *SMALL) == 2
    assert "learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--hidden", "20", "--heads", "3"], "cannot be shared"),
        (["--boost-weight", "1"], "would change nothing"),
        (["--boost-against", "absent"], "absent"),
        (["--tokens", "many"], "not a number of tokens"),
        (["--init", "absent"], "absent"),
    ],
)
def test_wrong_options_are_one_sentence(
    target: LoadedModel, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert train("small-model", "one", *options) in (1, 2)
    printed = capsys.readouterr().err.strip().splitlines()
    assert sentence in printed[-1]
    assert not Path("one").exists()


def test_medusa2_says_that_the_target_changed(target: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("medusa2", "new", "--heads", "2", "--rank", "4", "--lr", "0.005") == 0
    printed = capsys.readouterr()
    assert "THE TARGET CHANGED: new is another model than target" in printed.out
    new = load_model("new", EngineConfig(model="new", dtype="float32"))
    assert f"{fingerprint(target.model)} before, {fingerprint(new.model)} after" in printed.out
    assert "--model new --drafter medusa:head=new.medusa.safetensors" in printed.err
    asked = ["generate", "t3t4t5", "--model", "new", "--max-new-tokens", "12", "--raw", "--dtype", "float32"]
    assert run([*asked, "--drafter", "medusa:new.medusa.safetensors", "--no-adaptive"]) == 0
    drafted = capsys.readouterr().out
    assert run([*asked, "--drafter", "none"]) == 0
    assert capsys.readouterr().out == drafted


@pytest.fixture
def package(target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one small model for ``target``, as it would ship."""
    folder = tmp_path / "package"
    monkeypatch.setattr(shipped, "folder", lambda: folder)
    card = {"target": str(tmp_path / "target"), "tokenizer": vocabulary_hash(target.tokenizer)}
    source = save_llama(tmp_path / "trained", random_llama(tiny_config(num_layers=1), seed=9), card=card)
    shipped.ship(source, folder / "tiny-draft", "tiny", "MIT")
    shutil.rmtree(source)
    return folder


def test_a_model_of_the_package_drafts_with_the_targets_tokenizer(
    target: LoadedModel, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.name for path in (package / "tiny-draft").iterdir()} == set(shipped.FILES)
    asked = ["generate", "t3t4t5", "--model", "target", "--max-new-tokens", "12", "--raw", "--dtype", "float32"]
    assert run([*asked, "--drafter", "small_model", "--draft-model", "tiny-draft", "--no-adaptive"]) == 0
    config = EngineConfig(dtype="float32")
    assert load_model("tiny-draft", config, sharing=target).tokenizer is target.tokenizer
    alone = load_model("tiny-draft", config)  # its owner's, read again
    assert alone.tokenizer.vocabulary() == letters().vocabulary()
    other = LoadedModel(target.model, letters(39), "other", torch.float32, "")
    assert load_model("tiny-draft", config, sharing=other).tokenizer.vocab_size == 40


def test_models_of_the_package_are_listed(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert "in the package" in capsys.readouterr().out
    assert run(["models", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["tiny-draft"]["path"] == str(package / "tiny-draft")
    assert run(["pull", "tiny-draft"]) == 0
    assert capsys.readouterr().out.strip() == str(package / "tiny-draft")
    assert run(["generate", "x", "--model", "tiny-draff"]) == 2
    assert "did you mean 'tiny-draft'" in capsys.readouterr().err


def test_models_that_ship_are_small_and_whole() -> None:
    for model in shipped.shipped_models().values():
        assert model.bytes < 25_000_000
        assert {path.name for path in model.directory.iterdir()} == set(shipped.FILES)


def test_the_toy_model_gets_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target narrower than its small model, and a table without weights."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "features", count=40)
    asked = ["--data", "features", "--model", "toy", "--output", "one", "--tokens", "500", "--row", "32"]
    assert run(["train", "small-model", *asked, "--batch-tokens", "128", "--vocabulary", "40", *SMALL]) == 0
    parts = ["--drafter", "small_model", "--draft-model", "one", "--no-adaptive"]
    assert run(["generate", "Name three rivers.", "--model", "toy", *parts, "--max-new-tokens", "8"]) == 0
    assert run(["train", "medusa2", *asked[:-2], "--row", "32"]) == 2
    assert "exists" not in (said := capsys.readouterr().err)
    assert "has no weights to train" in said
