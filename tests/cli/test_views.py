"""Trees, tables, demo, methods and doctor as text."""

from __future__ import annotations

import io
import json

import pytest
from fake_engine import FakeTokenizer, Loader
from rich.console import Console

from outrider.cli import app, machine
from outrider.cli.tree_view import step_tree
from outrider.types import StepRecord


def shown(record: StepRecord) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(step_tree(record, 7, FakeTokenizer()))  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_tree_marks_are_readable_without_colour() -> None:
    record = StepRecord(
        "decode", 3, drafted=3, accepted=2, emitted=(97, 98, 99), tokens=(120, 97, 100, 98),
        parents=(-1, 0, 0, 1), sources=("", "ngram", "ngram", "[b]"), accepted_path=(1, 3),
    )  # fmt: skip
    lines = [line.rstrip() for line in shown(record).splitlines()]
    assert lines == [
        "step 7 (decode) after 'x': 2 of 3 guesses accepted, kept 'a' 'b' 'c'",
        "├── + 'a'  [ngram]",
        "│   └── + 'b'  [[b]]",
        "└── - 'd'  [ngram]",
    ]


def test_token_text_cannot_change_the_terminal() -> None:
    text = shown(StepRecord("decode", 0, 1, 0, (27,), tokens=(27, 10), parents=(-1, 0), sources=("", "")))
    assert "\x1b" not in text
    assert "'\\x1b'" in text
    assert "- '\\n'" in text


def test_demo_ends_with_the_comparison(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import outrider

    class Same:
        def describe(self) -> str:
            return "outputs are identical (160 tokens)"

    monkeypatch.setattr(outrider, "compare_outputs", lambda *_: Same(), raising=False)
    assert app.run(["demo", "--drafter", "ngram:x=1"]) == 0
    assert loader.options[0].drafter == "ngram:x=1"
    assert loader.engine.parts == [{"adaptive": False}], "the warm-up drafts, whatever the controller would begin with"
    out = capsys.readouterr().out
    assert out.count("you said: Repeat the following") == 2
    assert out.splitlines()[-2:] == ["speed-up when decoding: 1.00x", "outputs are identical (160 tokens)"]
    for figure in ("mean acceptance length", "guesses drafted", "seconds: draft", "seconds: other"):
        assert figure in out


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["methods", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"ngram", "greedy", "chain", "synchronous"} <= {row["name"] for row in found}
    assert app.run(["methods"]) == 0
    out = capsys.readouterr().out
    assert "multi_step" in out
    assert max(map(len, out.splitlines())) <= 80


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_PROBE_SECONDS", 0.05)
    assert app.run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cores"] >= 1
    assert facts["memory read GB/s"] > 0
    assert facts["allocator settings"].startswith(("active", "not"))
    assert app.run(["doctor"]) == 0
    assert "instruction sets" in capsys.readouterr().out
