"""``outrider generate --file``: formats, resuming, refusing to mix settings, rows that cannot be answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Loader

from outrider.cli import app
from outrider.cli.answer_file import AnswerFile
from outrider.engine.stats import Stats
from outrider.errors import DownloadError, RunError, UsageError
from outrider.text.prompt_file import read_prompts

PROMPTS = [
    {"prompt": "one", "id": "a"},
    {"text": "two"},
    {"messages": [{"role": "user", "content": "three"}]},
    {"question_id": 81, "turns": ["four", "and more"]},
    {"prompt": "五"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in PROMPTS) + "\n\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(prompts: Path, output: Path, *more: str) -> int:
    return app.run(["generate", "--file", str(prompts), "--output", str(output), *more])


@pytest.mark.parametrize("batch", ["1", "3", "10"])
def test_every_format_is_answered(prompts: Path, tmp_path: Path, loader: Loader, batch: str) -> None:
    assert run(prompts, tmp_path / "out", "--batch", batch) == 0
    found = sorted(rows(tmp_path / "out"), key=lambda row: row["index"])
    texts = ["you said: one", "you said: two", "you said: three", "you said: and more", "you said: 五"]
    assert [row["text"] for row in found] == texts
    assert found[3]["answers"] == ["you said: four", "you said: and more"]
    assert [row.get("id") for row in found] == ["a", None, None, 81, None]
    second_turn = [
        {"role": "user", "content": "four"},
        {"role": "assistant", "content": "you said: four"},
        {"role": "user", "content": "and more"},
    ]
    assert (second_turn, False) in loader.engine.prompts


def test_a_run_that_was_killed_continues(prompts: Path, tmp_path: Path, loader: Loader) -> None:
    output = tmp_path / "out"
    assert run(prompts, output) == 0
    whole = sorted(row["index"] for row in rows(output))
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:2]) + lines[2][:25])  # killed while writing the third row
    kept = {json.loads(line)["index"] for line in lines[:2]}
    loader.engine.prompts.clear()
    assert run(prompts, output, "--batch", "2", "--threads", "1") == 0  # neither changes what is answered
    assert sorted(row["index"] for row in rows(output)) == whole
    assert output.read_bytes().startswith(b"".join(lines[:2]))
    assert len(loader.engine.prompts) == len(PROMPTS) + 1 - len(kept) - (3 in kept)


def test_nothing_is_loaded_when_all_is_done(prompts: Path, tmp_path: Path, loader: Loader) -> None:
    run(prompts, tmp_path / "out")
    loader.options.clear()
    assert run(prompts, tmp_path / "out") == 0
    assert loader.options == []


def test_a_changed_prompt_is_answered_again(prompts: Path, tmp_path: Path, loader: Loader) -> None:
    run(prompts, tmp_path / "out")
    prompts.write_text(prompts.read_text().replace('"one"', '"changed"'))
    assert run(prompts, tmp_path / "out") == 0
    assert rows(tmp_path / "out")[-1]["text"] == "you said: changed"


def test_other_settings_are_not_mixed(
    prompts: Path, tmp_path: Path, loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    run(prompts, tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    capsys.readouterr()
    assert run(prompts, tmp_path / "out", "--temperature", "0.5") == 2
    assert "temperature=0.0, now it is 0.5" in capsys.readouterr().err
    assert (tmp_path / "out").read_bytes() == before


def test_a_foreign_file_is_not_touched(
    prompts: Path, tmp_path: Path, loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("my notes\nmore")
    assert run(prompts, tmp_path / "out") == 2
    assert "line 1 was not written by" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "my notes\nmore"


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "line 1 is not JSON"), ('{"question": "x"}', "line 1 has no prompt"), ('{"prompt": " "}', "no prompt"),
     ('{"messages": [{"role": "user"}]}', "no prompt"), ('{"turns": []}', "no prompt"), ("", "holds no prompts")],
)  # fmt: skip
def test_bad_prompt_files(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").write_text(line + "\n")
    assert run(tmp_path / "p", tmp_path / "out") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_is_too_long_does_not_stop_the_others(
    tmp_path: Path, loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    loader.engine.model.context_length = 20
    (tmp_path / "p").write_text('{"prompt": "ok"}\n{"prompt": "' + "x" * 30 + '"}\n{"prompt": "fine"}\n')
    assert run(tmp_path / "p", tmp_path / "out") == 1
    found = {row["index"]: row for row in rows(tmp_path / "out")}
    assert "30 tokens" in found[1]["error"]
    assert (found[0]["text"], found[2]["text"]) == ("you said: ok", "you said: fine")
    assert "1 of 3 rows could not be answered" in capsys.readouterr().err


def test_without_output_rows_go_to_stdout(prompts: Path, loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", "--file", str(prompts), "--stats"]) == 0
    captured = capsys.readouterr()
    assert len([json.loads(line) for line in captured.out.splitlines()]) == len(PROMPTS)
    assert "all prompts" in captured.err


@pytest.mark.parametrize(("more", "words"), [(["--raw"], "single prompts only"), (["--batch", "0"], "at least 1")])
def test_refusals(
    more: list[str], words: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts, tmp_path / "out", *more) == 2
    assert words in capsys.readouterr().err


def test_the_real_engine_in_batches(tmp_path: Path) -> None:
    (tmp_path / "p").write_text('{"prompt": "ab"}\n{"turns": ["cd"]}\n{"prompt": "ef"}\n')
    common = ["--model", "toy", "-n", "12"]
    assert run(tmp_path / "p", tmp_path / "one", *common) == 0
    assert run(tmp_path / "p", tmp_path / "two", *common, "--batch", "2") == 0
    texts = [sorted((row["index"], row["text"]) for row in rows(tmp_path / name)) for name in ("one", "two")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"], ids=ascii)
def test_only_newlines_end_a_row(character: str, tmp_path: Path) -> None:
    text = f"a{character}b"
    is_control = character < " "  # JSON requires these to be escaped
    line = json.dumps({"prompt": text}, ensure_ascii=is_control)
    (tmp_path / "p").write_text(f"{line}\r\n{line}\n", encoding="utf-8", newline="")
    assert [row.turns for row in read_prompts(tmp_path / "p")] == [(text,), (text,)]


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n')
    assert read_prompts(tmp_path / "p")[0].turns == ("one",)


def test_prompt_files_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").write_bytes('{"prompt": "café"}'.encode("latin-1"))
    assert run(tmp_path / "p", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "line 1 is not UTF-8" in error
    assert error.count("\n") == 1


def test_half_a_surrogate_pair_is_an_error_of_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").write_text('{"prompt": "\\ud83d"}\n{"prompt": "ab"}\n')
    assert run(tmp_path / "p", tmp_path / "out", "--model", "toy", "-n", "4") == 1
    found = {row["index"]: row for row in rows(tmp_path / "out")}
    assert "not valid Unicode" in found[0]["error"]
    assert "error" not in found[1]


def test_a_failed_start_leaves_no_empty_file(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        assert (tmp_path / "out").exists()  # a file that cannot be written is found out before the model is fetched
        raise DownloadError("no network")

    monkeypatch.setattr("outrider.cli.engine_factory.load_engine", fail)
    assert run(prompts, tmp_path / "out") == 1
    assert "no network" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["no/such/folder/out", "."])
def test_an_output_that_cannot_be_written(
    name: str, prompts: Path, tmp_path: Path, loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(prompts, tmp_path / name) == 2
    error = capsys.readouterr().err
    assert "cannot write to --output" in error
    assert error.count("\n") == 1
    assert loader.options == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_a_failed_run() -> None:
    answers = AnswerFile(Path("/dev/full"), {})
    with pytest.raises(RunError, match="/dev/full: No space left on device; make room and run the same"):
        answers.write({"index": 0})
    answers.close()


needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="no flock")


@needs_locks
def test_two_runs_do_not_share_an_output(
    prompts: Path, tmp_path: Path, loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    code = (
        "import pathlib, sys; from outrider.cli.answer_file import AnswerFile; "
        "held = AnswerFile(pathlib.Path(sys.argv[1]), {}); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert run(prompts, output) == 2
    error = capsys.readouterr().err
    assert f"another process is writing to --output {output}; " in error
    assert error.count("\n") == 1
    assert loader.options == []
    assert output.exists()  # the refused run takes nothing away from the other one
    other.kill()
    other.communicate()
    assert run(prompts, output) == 0  # a killed process holds nothing


@needs_locks
def test_a_held_output_is_not_mended(tmp_path: Path) -> None:
    """A torn last line may be one that the other run is about to complete."""
    (tmp_path / "out").write_text("")
    held = AnswerFile(tmp_path / "out", {})
    (tmp_path / "out").write_text('{"index": 0, "pro')
    with pytest.raises(UsageError, match="another process"):
        AnswerFile(tmp_path / "out", {})
    assert (tmp_path / "out").read_text() == '{"index": 0, "pro'
    held.close()


@needs_locks
def test_a_refused_output_is_released(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("my notes\n")
    with pytest.raises(UsageError, match="not written by"):
        AnswerFile(tmp_path / "out", {})
    (tmp_path / "out").write_text("")
    AnswerFile(tmp_path / "out", {}).close()


def test_an_output_that_its_last_run_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run closes its empty file after this one opened it and before this one locked it."""
    output, attempts = tmp_path / "out", []

    def lock(stream: object) -> bool:
        attempts.append(stream)
        if len(attempts) == 1:
            output.unlink()
        return True

    monkeypatch.setattr("outrider.cli.answer_file._lock", lock)
    answers = AnswerFile(output, {})
    answers.write({"index": 0})
    answers.close()
    assert len(attempts) == 2
    assert len(rows(output)) == 1


def test_statistics_of_a_file_are_those_of_its_answers(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, Stats] = {}
    monkeypatch.setattr("outrider.cli.prompt_run.stats_table", lambda runs: shown.update(runs) or "")
    (tmp_path / "p").write_text('{"prompt": "one"}\n{"turns": ["four", "and more"]}\n')
    assert run(tmp_path / "p", tmp_path / "out", "--stats") == 0
    stats = shown["all prompts"]
    answers = [answer for row in rows(tmp_path / "out") for answer in row["answers"]]
    assert len(answers) == 3
    assert stats.output_tokens == sum(map(len, answers))  # the fake engine's tokens are characters
    assert stats.prompt_tokens == len("one" + "four" + "and more")
    assert stats.num_first_tokens == 3
    assert stats.decode_seconds == pytest.approx((stats.output_tokens - 3) * 1.0)
    assert stats.tokens_per_second == pytest.approx(1.0)
