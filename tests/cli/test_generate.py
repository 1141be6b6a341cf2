"""``outrider generate`` with one prompt: streaming, JSON, and no flag that changes nothing."""

from __future__ import annotations

import inspect
import io
import json
import sys
from pathlib import Path

import pytest
from fake_engine import Loader

import outrider
from outrider.cli import app, generate
from outrider.cli.prompt_run import FileRun

CHANGES = {
    "model": ["--model", "toy"],
    "drafter": ["--drafter", "replay:0.8"],
    "draft_model": ["--draft-model", "toy-draft"],
    "shape": ["--shape", "chain:8"],
    "proposal": ["--proposal", "iid"],
    "verifier": ["--verifier", "multi_step"],
    "max_nodes": ["--max-nodes", "3"],
    "lossy": ["--lossy"],
    "adaptive": ["--no-adaptive"],
    "dtype": ["--dtype", "float32"],
    "weights": ["--weights", "int4"],
    "device": ["--device", "cuda:1"],
    "threads": ["--threads", "1"],
    "fallback": ["--fallback"],
    "trust_remote_code": ["--trust-remote-code"],
    "temperature": ["--temperature", "0.5"],
    "top_k": ["--top-k", "5"],
    "top_p": ["--top-p", "0.5"],
    "min_p": ["--min-p", "0.1"],
    "seed": ["--seed", "7"],
    "max_new_tokens": ["--max-new-tokens", "9"],
    "min_tokens": ["--min-tokens", "2"],
    "stop": ["--stop", "a", "--stop", "b"],
    "stop_token_id": ["--stop-token-id", "5"],
    "ignore_eos": ["--ignore-eos"],
    "repetition_penalty": ["--repetition-penalty", "1.1"],
    "presence_penalty": ["--presence-penalty", "1"],
    "frequency_penalty": ["--frequency-penalty", "1"],
    "logit_bias": ["--logit-bias", "3=-5", "--logit-bias", "4=1.5"],
    "logprobs": ["--logprobs", "2"],
    "raw": ["--raw"],
    "as_json": ["--json"],
    "show_tree": ["--show-tree"],
    "stats": ["--stats"],
    "compare": ["--compare"],
}
FILE_CHANGES = {
    "file": ["--file", "other.jsonl"],
    "batch": ["--batch", "3"],
    "output": ["--output", "out.jsonl"],
    "raw": ["--raw"],
    "stats": ["--stats"],
}
SPECIAL = {"prompt", "grammar"}  # the prompt has its own tests, a grammar is refused


def resolved(arguments: list[str], loader: Loader, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """What the command hands on."""
    seen: list[object] = []
    monkeypatch.setattr(generate, "answer", lambda engine, prompt, params, show: seen.extend([params, show]))
    monkeypatch.setattr(generate, "run_file", lambda run, options, params: seen.extend([run, options, params]))
    assert app.run(["generate", *arguments]) == 0
    return (*loader.options, *loader.engine.prompts, *seen)


def test_every_parameter_is_covered() -> None:
    parameters = set(inspect.signature(generate.generate).parameters)
    assert parameters == set(CHANGES) | set(FILE_CHANGES) | SPECIAL


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_no_flag_is_ignored(name: str, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolved(["x"], loader, monkeypatch)
    loader.options.clear()
    loader.engine.prompts.clear()
    assert resolved(["x", *CHANGES[name]], loader, monkeypatch) != before


@pytest.mark.parametrize("name", sorted(FILE_CHANGES))
def test_no_file_flag_is_ignored(name: str, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolved(["--file", "p.jsonl"], loader, monkeypatch)
    assert isinstance(before[0], FileRun)
    assert resolved(["--file", "p.jsonl", *FILE_CHANGES[name]], loader, monkeypatch) != before


def test_values_reach_the_parameters(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [word for words in CHANGES.values() for word in words if words != CHANGES["compare"]]
    options, _, params, show = resolved(["x", *arguments], loader, monkeypatch)
    assert (options.drafter, options.threads, options.adaptive) == ("replay:0.8", 1, False)  # type: ignore[attr-defined]
    assert params.logit_bias == {3: -5.0, 4: 1.5}  # type: ignore[attr-defined]
    assert params.stop == ("a", "b")  # type: ignore[attr-defined]
    assert params.max_tokens == 9  # type: ignore[attr-defined]
    assert show.as_json  # type: ignore[attr-defined]


class Flushed(io.StringIO):
    """Remembers the text at every flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_text_is_streamed_and_flushed(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    output = Flushed()
    monkeypatch.setattr(sys, "stdout", output)
    assert app.run(["generate", "hi"]) == 0
    assert output.getvalue() == "you said: hi\n"
    assert output.seen[:3] == ["y", "yo", "you"]
    assert loader.engine.closed == 1


def test_prompt_from_standard_input(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert app.run(["generate", "-", "--raw"]) == 0
    assert loader.engine.prompts == [("from a pipe", True)]
    assert capsys.readouterr().out == "you said: from a pipe\n"


def test_json_is_one_object_and_nothing_else(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Same:
        def describe(self) -> str:
            return "outputs are identical"

    monkeypatch.setattr(outrider, "compare_outputs", lambda *_: Same(), raising=False)
    assert app.run(["generate", "hi", "--json", "--compare"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["text"] == "you said: hi"
    assert found["output_tokens"] == len(found["tokens"]) == 12
    assert found["finish_reason"] == "length"
    assert found["stats"]["tokens_per_second"] > 0
    assert found["comparison"] == "outputs are identical"
    assert captured.err == ""


def test_stats_and_trees_go_to_stderr(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", "hi", "--stats", "--show-tree", "-n", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "you\n"
    assert "tokens per second" in captured.err
    assert captured.err.count("guesses accepted,") == 3
    assert max(map(len, captured.err.splitlines())) <= 80


def test_an_interrupt_ends_with_130_and_closes_the_stream(loader: Loader, capsys: pytest.CaptureFixture[str]) -> None:
    loader.engine.interrupt_after = 3
    assert app.run(["generate", "hi"]) == 130
    assert capsys.readouterr().out == "you"
    assert loader.engine.closed == 1


def test_the_real_engine_on_the_toy_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", "--model", "toy", "--drafter", "replay:0.8", "-n", "30", "--json", "--compare"]
    assert app.run([*arguments, "--ignore-eos", "--logprobs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"] == "outputs are identical (30 tokens)"
    assert len(found["logprobs"]) == 30


def test_file_and_output_must_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert app.run(["generate", "--file", str(path), "--output", str(path)]) == 2
    assert "choose another" in capsys.readouterr().err


def stdin(data: bytes, encoding: str, errors: str) -> io.TextIOWrapper:
    """Standard input as the interpreter opens it; ``errors`` is how it takes what does not decode."""
    return io.TextIOWrapper(io.BytesIO(data), encoding=encoding, errors=errors)


@pytest.mark.parametrize(
    ("encoding", "errors"), [("utf-8", "strict"), ("ascii", "surrogateescape")], ids=["UTF-8 locale", "C locale"]
)
def test_bytes_that_are_not_utf8_on_stdin_are_a_usage_error(
    encoding: str, errors: str, loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin(b"caf\xe9", encoding, errors))
    assert app.run(["generate", "-"]) == 2
    assert capsys.readouterr().err == "outrider: error: the prompt is not UTF-8 text; convert it first\n"
    assert loader.options == []


def test_utf8_is_read_in_the_c_locale_too(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", stdin("café".encode(), "ascii", "surrogateescape"))
    assert app.run(["generate", "-"]) == 0
    assert loader.engine.prompts == [("café", False)]
