"""``outrider train collect``, ``prompts`` and ``export-answers`` on the toy model, errors and interrupts included."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from outrider.cli import app as border
from outrider.cli import engine_factory, train_data
from outrider.training.collect import Progress
from outrider.training.shards import describe, open_folder, shard_paths

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run one of the commands behind the border that turns errors into a line and an exit code."""
    app = typer.Typer()
    for name in ("collect", "prompts", "export-answers"):
        app.command(name)(getattr(train_data, name.replace("-", "_")))
    monkeypatch.setattr(border, "app", app)
    return lambda *arguments: border.run([str(argument) for argument in arguments])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {'abcdef'[i]}"}) + "\n" for i in range(6)))
    return path


def test_collect_export_and_replay(run: Run, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, answers = tmp_path / "first", tmp_path / "second", tmp_path / "answers.safetensors"
    assert run("collect", prompts, "--model", "toy", "-o", first, "-n", 9, "--repeats", 2) == 0
    said = capsys.readouterr()
    assert f"{first}: 12 answers" in said.out
    assert re.search(r"12 answers to go; all features take 0\.0[1-9] MB at most", said.err)
    assert run("export-answers", first, "-o", answers) == 0
    assert "12 answers, " in capsys.readouterr().out
    assert run("collect", "--answers", answers, "--model", "toy", "-o", second, "--features", "0,final") == 0
    fingerprint, shards = open_folder(second)
    assert fingerprint.features == (0, "final")
    assert describe(shards) == describe(open_folder(first)[1])


def test_default_features_are_those_of_the_heads(run: Run, prompts: Path, tmp_path: Path) -> None:
    assert run("collect", prompts, "--model", "toy", "-o", tmp_path / "f", "-n", 2) == 0
    assert open_folder(tmp_path / "f")[0].features == (2, 1, "final")


def test_a_rerun_says_that_nothing_is_new(
    run: Run, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("collect", prompts, "--model", "toy", "-o", tmp_path / "f", "-n", 4)
    assert run(*arguments) == 0
    assert run(*arguments) == 0
    assert capsys.readouterr().out.endswith("f: 6 answers (0 tokens new)\n")
    assert run(*arguments[:-1], 5) == 2
    assert "max_new_tokens=4, now it is 5" in capsys.readouterr().err


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(train_data.time, "monotonic", lambda: clock[0])
    with train_data._Reporter("answers") as reporter:
        for done in range(301):
            clock[0] = 1.0 * done
            reporter.progress(Progress(total=1000, done=500 + done, tokens=20 * done))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("answers")]
    assert len(lines) == 5
    assert lines[0] == "answers 560 of 1000, 20 tokens/s, 7:20 left"
    assert lines[-1] == "answers 800 of 1000, 20 tokens/s, 3:20 left"


def test_left_out_prompts_are_said(run: Run, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 99}) + "\n")
    limits = ("-n", 2, "--max-prompt-tokens", 20)
    assert run("collect", prompts, "--model", "toy", "-o", tmp_path / "f", *limits) == 0
    assert "left out: 1 answers whose prompt has more than 20 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("collect",), "give either files of prompts or --answers"),
        (("collect", "P", "--answers", "P"), "give either files of prompts or --answers"),
        (("collect", "missing.jsonl"), "cannot read the prompts in missing.jsonl"),
        (("collect", "P", "--temperatures", "0,warm"), "--temperatures '0,warm' is not numbers"),
        (("collect", "P", "--temperatures", "-1"), "temperatures.0=-1.0 is not allowed"),
        (("collect", "P", "--temperatures", "nan"), "temperatures.0=nan is not allowed"),
        (("collect", "P", "--repeats", "0"), "repeats=0 is not allowed"),
        (("collect", "P", "--features", "7", "--model", "toy"), "'7' is not a hidden state of toy"),
        (("collect", "P", "--dtype", "float8"), "dtype='float8' is not allowed"),
        (("collect", "--answers", "P", "--model", "toy"), "is not a file of 'outrider train export-answers'"),
        (("prompts", "-o", "none/p.jsonl"), "is in no existing folder"),
        (("prompts", "-o", "p.jsonl", "--model", "toy"), "no chat template"),
        (("prompts", "-o", "p.jsonl", "--count", "0"), "--count"),
        (("prompts", "-o", "p.jsonl", "--exclude", "none"), "cannot read the evaluation texts in none"),
        (("export-answers", "none", "-o", "a"), "none holds no feature files"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], words: str, run: Run, prompts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(*(str(prompts) if argument == "P" else argument for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert words in error.replace("\n", " ")
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["prompts.jsonl"] or words.startswith(
        "is not"
    )


def test_bad_lines_come_before_the_model(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_factory, "load_target", lambda *_: pytest.fail("the model was loaded"))
    prompts.write_text('{"prompt": "a"}\n{\n{"turns": []}\n')
    assert run("collect", prompts, "-o", tmp_path / "f") == 2
    error = capsys.readouterr().err
    assert "line 2 is not JSON" in error
    assert "line 3 has no prompt" in error


def test_prompts_written_by_the_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from training.tiny_targets import toy_target

    monkeypatch.setattr(engine_factory, "load_target", lambda *_: toy_target(sharpness=0.5))
    output = tmp_path / "p.jsonl"
    assert run("prompts", "-o", output, "--count", 20, "-n", 40, "--min-words", 1) == 0
    said = capsys.readouterr().out
    assert f"{output}: {len(output.read_text().splitlines())} prompts of 20 turns" in said
    assert "dropped, not finished: " in said


INTERRUPTED = """
import sys, typer
from outrider.cli import app as border, train_data
app = typer.Typer()
app.command("collect")(train_data.collect)
app.command("other")(train_data.prompts)
border.app = app
sys.exit(border.run(["collect", *sys.argv[1:]]))
"""


def test_ctrl_c_keeps_whole_answers_and_says_how_to_go_on(prompts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    command = [sys.executable, "-c", INTERRUPTED, str(prompts), "--model", "toy", "-o", str(folder)]
    process = subprocess.Popen(
        [*command, "--repeats", "1000", "-n", "1000", "--batch", "2"], stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not (folder / "collect.json").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "run the same command again to go on" in said
    assert "Traceback" not in said
    assert len(shard_paths(folder)) == 1
    assert describe(open_folder(folder)[1])["answers"] > 0
