"""``outrider tune acceptance`` on the toy model: what it counts, writes, prints and refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from outrider.cli.app import run
from outrider.engine.acceptance import Acceptance, accepted_children
from outrider.errors import RunError
from outrider.text.prompt_file import PromptRow
from outrider.types import StepRecord

TOY = ["tune", "acceptance", "--model", "toy", "--ignore-eos"]


def tune(*arguments: str, output: Path) -> dict[str, object]:
    assert run([*TOY, *arguments, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert isinstance(found, dict)
    return found


def test_the_file_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "vector.json"
    found = tune("--drafter", "layer_skip:3", "--limit", "2", "--width", "4", output=output)
    assert set(found) == {
        "model", "drafter", "draft_model", "temperature", "proposal", "verifier", "prompts", "steps", "vector", "none",
        "date", "command",
    }  # fmt: skip
    assert (found["model"], found["drafter"], found["proposal"]) == ("toy", "layer_skip:3", "deterministic")
    assert (found["prompts"], found["verifier"], found["draft_model"]) == (2, "greedy", None)
    vector = found["vector"]
    assert isinstance(vector, list)
    assert len(vector) == 4
    assert sum(vector) + float(str(found["none"])) == pytest.approx(1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["vector.json"]
    printed = capsys.readouterr().out
    assert "tokens per step (predicted)" in printed
    assert f"--shape sequoia:16,acceptance={output}" in printed


def test_a_known_acceptance_is_measured(tmp_path: Path) -> None:
    """The oracle offers the best token first in 7 of 10 steps, and otherwise not at all."""
    arguments = ("--drafter", "replay:0.7", "--limit", "6", "--max-new-tokens", "120", "--seed", "5", "--width", "3")
    found = tune(*arguments, output=tmp_path / "v")
    vector, steps = found["vector"], int(str(found["steps"]))
    assert isinstance(vector, list)
    assert vector[0] == pytest.approx(0.7, abs=4 * (0.21 / steps) ** 0.5)
    assert vector[1:] == [0.0, 0.0]
    assert steps > 300


@pytest.mark.parametrize("drafter", ["ensemble:ngram+suffix", "hybrid:ngram+suffix"])
def test_a_drafter_of_members_has_no_vector_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: str
) -> None:
    """The union of its members' stars has more children than the star that was asked for."""
    command = [*TOY, "--drafter", drafter, "--limit", "1", "--output", str(tmp_path / "v")]
    assert run(command) != 0
    assert "measure the members one by one" in capsys.readouterr().err


def test_sampling_measures_draws(tmp_path: Path) -> None:
    arguments = ("--drafter", "layer_skip:3", "--limit", "2", "--temperature", "0.8", "--seed", "1")
    found = tune(*arguments, output=tmp_path / "v")
    assert (found["proposal"], found["verifier"]) == ("without_replacement", "multi_step")
    assert found["temperature"] == 0.8


def test_the_recorded_command_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "my prompts.jsonl"
    rows = [{"prompt": "Hello"}, {"turns": ["Good day", "And now?"]}, {"messages": [{"role": "user", "content": "Hm"}]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    found = tune("--drafter", "layer_skip:3", "--file", str(prompts), "-t", "0.7", "--seed", "4", output=tmp_path / "v")
    words = shlex.split(str(found["command"]))
    assert run([*words[1:], "--ignore-eos"]) == 0
    again = json.loads((tmp_path / "acceptance.json").read_text())
    assert again | {"date": found["date"]} == found


def test_sequoia_reads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "vector.json"
    tune("--drafter", "layer_skip:3", "--limit", "2", output=output)
    capsys.readouterr()
    shape = f"sequoia:6,acceptance={output}"
    arguments = ["--model", "toy", "--drafter", "layer_skip:3", "--shape", shape, "-n", "20", "--json", "--compare"]
    assert run(["generate", "hello", *arguments, "--ignore-eos"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"] == "outputs are identical (20 tokens)"
    assert found["stats"]["num_accepted_tokens"] > 0


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune("--drafter", "layer_skip:3", "--limit", "1", "--json", output=tmp_path / "v")
    found = json.loads(capsys.readouterr().out)
    predicted = list(found["predicted_tokens_per_step"].values())
    assert predicted == sorted(predicted)
    assert predicted[0] == pytest.approx(1.0 + found["vector"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "0"], "width=0 is not allowed"),
        (["--width", "65"], "width=65 is not allowed"),
        (["--limit", "0"], "--limit 0 is not allowed"),
        (["--drafter", "none"], "no guess of drafter 'none' was accepted"),
        (["--drafter", "layer_skip:3", "-t", "1", "--proposal", "iid"], "iid proposals merge equal trials"),
        (["--drafter", "ngram", "-t", "1", "--proposal", "iid"], "use --proposal deterministic"),
        (["--output", "missing/vector.json"], "--output missing/vector.json cannot be written there"),
        (["--output", "."], "--output . cannot be written there"),
    ],
)
def test_refusals(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*TOY, *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_prompts_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    assert run([*TOY, "--file", str(prompts), "--output", str(prompts)]) == 2
    assert "is the file of prompts" in capsys.readouterr().err
    assert prompts.read_text() == '{"prompt": "abc"}\n'


def test_an_old_file_outlives_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Acceptance("m", "d", None, 0.0, "deterministic", "greedy", 1, 2, (0.5,), 0.5, "today")
    output = tmp_path / "vector.json"
    output.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(RunError, match="No space left on device"):
        measured.save(output, "command")
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def record(position: int, path: tuple[int, ...] = (), phase: str = "decode") -> StepRecord:
    """A step with a star of three children, the second of which has a child."""
    return StepRecord(phase, position, 4, len(path), (1,), parents=(-1, 0, 0, 2, 0), accepted_path=path)


def test_what_counts_as_a_step() -> None:
    records = [record(0, phase="prefill"), record(1, (2, 3)), record(3, (4,)), record(5), record(9, (1,))]
    assert accepted_children(records, room=10) == [1, 2, None]


def test_what_is_measured_of_a_row_is_its_first_turn_or_its_conversation() -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert PromptRow(0, turns=("first", "second")).first == "first"
    assert PromptRow(0, messages=messages).first == list(messages)
