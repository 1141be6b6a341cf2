"""``outrider train METHOD`` on the toy model: files, cards, exact resume after kill -9, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.cli import train
from outrider.cli.app import run
from outrider.config import EngineConfig
from outrider.engine.loading import load_model
from outrider.heads.build import new_config
from outrider.heads.file import load_head, read_card, save_head
from outrider.heads.registry import network_class
from outrider.text.toy_tokenizer import toy_tokenizer
from outrider.text.vocabulary import vocabulary_hash
from outrider.training.checkpoint import checkpoint_paths
from outrider.training.loop import Trainer
from training.synthetic_shards import toy_fingerprint, write_data

pytestmark = pytest.mark.usefixtures("pictures")

SMALL = ("--tokens", "1500", "--row", "32", "--batch-tokens", "64", "--draft-vocab", "40", "--threads", "1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data(tmp_path / "data", count=120)
    return tmp_path / "data"


def arguments(method: str, data: Path, output: Path, *more: str) -> list[str]:
    return ["train", method, "--model", "toy", "--data", str(data), "--output", str(output), *SMALL, *more]


@pytest.mark.parametrize("method", [name.replace("_", "-") for name in train.HEADS])
def test_every_head_trains_and_drafts(
    method: str,
    data: Path,
    tmp_path: Path,
    pictures: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "head.safetensors"
    asked = arguments(method, data, output, "--validation", "0.1")
    monkeypatch.setattr(sys, "argv", ["outrider", *asked])
    assert run(asked) == 0
    printed = capsys.readouterr()
    name = method.replace("-", "_")
    assert printed.out.startswith(f"{output}: 15")
    assert "validation: top-1 " in printed.out
    assert pictures == [tmp_path / "head.png"]
    assert "tok/s" in printed.err
    assert f"--drafter {name}:head={output}" in printed.err
    head, card = load_head(output, name), read_card(output)
    assert head.config.draft_vocab_size == len(head.draft_ids) == 40  # type: ignore[arg-type]
    assert (head.config.target, head.config.tokenizer) == ("name:toy", vocabulary_hash(toy_tokenizer()))
    assert card["command"].startswith(f"outrider train {method} --model toy --data")
    assert 1_500 <= card["tokens"] < 1_564
    assert card["data"]["training_answers"] + card["data"]["validation_answers"] == 120
    assert set(card["validation"]) == {"loss", "top1", "overlap", "acceptance"}
    rows = [json.loads(line) for line in (tmp_path / "head.curves.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"training", "validation"}
    assert sorted(tmp_path.glob("*.part")) == []
    drafting = ["generate", "hello", "--model", "toy", "--raw", "-n", "12", "--drafter", f"{name}:head={output}"]
    assert run([*drafting, "--compare"]) == 0
    assert "identical" in capsys.readouterr().err


def test_kill_9_then_the_same_command(data: Path, tmp_path: Path) -> None:
    """Weights and curves equal those of an undisturbed run, byte for byte."""
    more = ("--set", "noise=0.1", "--tokens", "4k")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    command = [sys.executable, "-m", "outrider", *arguments("eagle", data, killed, *more)]
    command += ["--checkpoint-minutes", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    work, deadline = tmp_path / "killed.safetensors.work", time.monotonic() + 300
    while not checkpoint_paths(work) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not killed.exists()
    reached = int(checkpoint_paths(work)[-1].stem.removeprefix("checkpoint-"))
    assert 0 < reached < 4_000
    for output in (killed, whole):
        assert run(arguments("eagle", data, output, *more)) == 0
    curves = [(tmp_path / f"{name}.curves.jsonl").read_bytes() for name in ("killed", "whole")]
    assert curves[0] == curves[1]
    heads = [load_head(path).state_dict() for path in (killed, whole)]
    assert all(heads[0][name].equal(heads[1][name]) for name in heads[1])


def test_ctrl_c_saves_and_says_how_to_go_on(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "head.safetensors"
    command = [sys.executable, "-m", "outrider", *arguments("medusa", data, output, "--tokens", "50M")]
    process = subprocess.Popen(
        [*command, "--checkpoint-minutes", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    work, deadline = tmp_path / "head.safetensors.work", time.monotonic() + 300
    while not checkpoint_paths(work) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "the same command goes on" in err
    assert "Traceback" not in out + err
    assert not output.exists()


def refused(capsys: pytest.CaptureFixture[str], asked: list[str], code: int = 2) -> str:
    capsys.readouterr()
    assert run(asked) == code
    lines = capsys.readouterr().err.splitlines()
    return lines[-1].removeprefix("outrider: error: ")


def test_the_same_command_again_and_other_settings(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "head.safetensors"
    asked = arguments("medusa", data, output)
    assert run(asked) == 0
    first = load_head(output).state_dict()
    assert run([*asked, "--device", "cpu"]) == 0
    assert all(load_head(output).state_dict()[name].equal(tensor) for name, tensor in first.items())
    for more, said in (
        (("--lr", "0.002"), "learning_rate=0.001, this one has learning_rate=0.002"),
        (("--tokens", "4k"), "tokens=1500, this one has tokens=4000"),
        (("--steps", "2"), "steps=4, this one has steps=2"),
        (("--draft-vocab", "41"), "draft_vocab_size=40, this one has draft_vocab_size=41"),
        (("--set", "loss=kl"), "loss=soft_cross_entropy, this one has loss=kl"),
        (("--seed", "1"), "seed=0, this one has seed=1"),
    ):
        assert said in refused(capsys, [*asked, *more])
    write_data(data, count=119)
    assert " data=" in refused(capsys, asked)
    assert run([*asked, "--restart"]) == 0


def test_going_on_from_a_head_keeps_its_vocabulary(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    assert run(arguments("medusa", data, first)) == 0
    write_data(tmp_path / "other", count=30, seed=9)
    assert run(arguments("medusa", tmp_path / "other", second, "--init", str(first), "--draft-vocab", "20")) == 0
    one, two = load_head(first), load_head(second)
    assert one.draft_ids is not None
    assert two.draft_ids is not None
    assert one.draft_ids.equal(two.draft_ids)
    assert read_card(second)["init"] == str(first)
    assert any(not one.state_dict()[name].equal(two.state_dict()[name]) for name in one.state_dict())
    asked = arguments("medusa", data, tmp_path / "third", "--init", str(first), "--steps", "2")
    assert "has steps=4; steps=2 needs a new head" in refused(capsys, asked)
    asked = arguments("hydra", data, tmp_path / "third", "--init", str(first))
    assert "is a head for --drafter medusa" in refused(capsys, asked, 1)


def test_a_head_to_go_on_from_decides_its_own_shape(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(arguments("eagle3", data, first, "--steps", "2", "--tokens", "100")) == 0
    capsys.readouterr()
    again = ("--init", str(first), "--tokens", "100", "--draft-vocab", "30")
    assert run(arguments("eagle3", data, second, *again)) == 0
    assert f"{first} keeps its draft vocabulary of 40 tokens" in capsys.readouterr().err
    assert read_card(second)["objective"]["steps"] == load_head(second).config.steps == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 9}, "hidden size 9"),
        ({"vocab_size": 99}, "vocabulary 99"),
        ({"tokenizer": "0123"}, "another tokenizer"),
    ],
)
def test_a_head_of_another_target_is_not_gone_on_from(
    change: dict[str, object], said: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_model("toy", EngineConfig(model="toy")).model
    fields = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "draft_vocab_size": 99, **change}
    config = new_config("medusa", target).model_copy(update={**fields, "draft_vocab_size": fields["vocab_size"]})
    save_head(tmp_path / "other", network_class("medusa")(config))
    asked = arguments("medusa", data, tmp_path / "head", "--init", str(tmp_path / "other"))
    assert said in refused(capsys, asked)


def test_nothing_is_trained_that_could_not_be_stored(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "run", lambda _: pytest.fail("it trained"))
    (tmp_path / "file").write_text("")
    assert "cannot write to --output" in refused(capsys, arguments("medusa", data, tmp_path / "file" / "head"))
    work = ("--work-dir", str(tmp_path / "file" / "work"))
    assert "cannot write to --work-dir" in refused(capsys, arguments("medusa", data, tmp_path / "head", *work))


def test_an_interrupt_says_what_goes_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", interrupted)
    asked = arguments("medusa", data, tmp_path / "head")
    assert run(asked) == 130
    assert "goes on" not in capsys.readouterr().err  # there is no checkpoint yet

    def interrupted_later(self: Trainer) -> None:
        self.save()
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", interrupted_later)
    assert run([*asked, "--restart"]) == 130
    assert "the same command without --restart goes on" in capsys.readouterr().err


def test_the_best_validation_can_be_kept(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments("medusa", data, tmp_path / "head", "--validation", "0.2", "--keep-best")) == 0
    assert read_card(tmp_path / "head")["validation"]["acceptance"] >= 1.0
    capsys.readouterr()
    assert run(arguments("medusa", data, tmp_path / "other", "--validation", "0", "--keep-best")) == 0
    said = capsys.readouterr()
    assert "--keep-best has nothing to choose by" in said.err
    assert "validation:" not in said.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--minutes", "1"), "give one of them"),
        (("--tokens", "many"), "is not a number of tokens"),
        (("--tokens", "0"), "is not a number of tokens"),
        (("--batch-tokens", "16"), "less than one row of 32"),
        (("--dtype", "float16"), "not for training"),
        (("--threads", "0"), "at least 1"),
        (("--set", "loss"), "not of the form NAME=VALUE"),
        (("--set", "lost=kl"), "no option 'lost' for --set; known: loss, decay"),
        (("--set", "loss=square"), "loss='square' is not allowed"),
        (("--set", "hidden_size=9"), "no option 'hidden_size'"),
        (("--init", "nowhere"), "no head file 'nowhere'"),
        (("--device", "cuda"), "no CUDA GPU"),
        (("--device", "tpu"), "device='tpu' is not allowed"),
    ],
)
def test_mistakes_are_one_sentence(
    more: tuple[str, ...], said: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, arguments("medusa", data, tmp_path / "head", *more))
    assert not (tmp_path / "head").exists()


def test_wrong_data_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "head"
    write_data(tmp_path / "other", fingerprint=dataclasses.replace(toy_fingerprint(), target="0123", tokenizer="4567"))
    said = refused(capsys, arguments("medusa", tmp_path / "other", output))
    assert "was collected from another target and tokenizer than that of 'toy'" in said
    deeper = dataclasses.replace(toy_fingerprint(), target="0123", features=(2, 15, 27, "final"))
    write_data(tmp_path / "deeper", count=4, fingerprint=deeper)
    said = refused(capsys, arguments("medusa", tmp_path / "deeper", output))
    assert "was collected from another target than that of 'toy'" in said
    write_data(tmp_path / "few", fingerprint=toy_fingerprint((1, "final")))
    said = refused(capsys, arguments("eagle3", tmp_path / "few", output))
    assert "holds the hidden states 1, final, but 2 is needed" in said
    write_data(tmp_path / "unanswered", is_answered=False)
    said = refused(capsys, arguments("medusa", tmp_path / "unanswered", output))
    assert "no token that the target wrote" in said
    assert "holds no feature files" in refused(capsys, arguments("medusa", tmp_path / "nowhere", output))
    assert "is a directory" in refused(capsys, arguments("medusa", data, tmp_path))
    assert not output.exists()


def test_long_answers_and_missing_tokens_are_said(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments("medusa", data, tmp_path / "head", "--row", "16", "--draft-vocab", "10")
    assert run(asked) == 0
    said = capsys.readouterr().err
    assert "longer than a row of 16 tokens" in said
    assert "the draft vocabulary covers" in said


def test_the_whole_vocabulary(data: Path, tmp_path: Path) -> None:
    assert run(arguments("medusa", data, tmp_path / "head", "--draft-vocab", "0")) == 0
    head = load_head(tmp_path / "head")
    assert head.draft_ids is None
    assert head.config.draft_vocab_size == head.config.vocab_size


def test_plot_of_no_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("nothing")
    assert "is not a curve file" in refused(capsys, ["train", "plot", str(tmp_path / "x")])


@pytest.mark.parametrize(("text", "number"), [("500k", 500_000), ("2M", 2_000_000), ("1.5m", 1_500_000), ("77", 77)])
def test_counts(text: str, number: int) -> None:
    assert train.count_of(text) == number
