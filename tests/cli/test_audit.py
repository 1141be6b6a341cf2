"""``outrider audit`` on the toy model: tables, JSON, exit codes, options that exclude each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.audit import plan as planning
from outrider.audit.exact import ExactRow
from outrider.cli import app
from outrider.engine.registry import VERIFIERS
from outrider.types import ProposalKind, Topology

TOY = ["--model", "toy", "--drafter", "layer_skip", "--threads", "1"]
SMALL = ["--samples", "100", "--tokens", "3", "--replays", "1000", "--greedy-tokens", "6"]


@pytest.fixture(autouse=True)
def _short_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ExactRow("multi_step", ProposalKind.IID, Topology.TREE, "greedy", 0.0, 4, True, "chain")
    monkeypatch.setattr(planning, "exact_audit", lambda progress, thorough: [row])


def test_every_part_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["audit", *TOY, *SMALL]) == 0
    out = capsys.readouterr().out
    for heading in ("exact: passed", "faults: passed", "greedy: passed", "replay: passed", "statistics: passed"):
        assert heading in out
    assert out.splitlines()[-1] == "audit passed (passed: exact, faults, greedy, replay, statistics)"
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_one_object_and_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("3", "3", "4"):
        command = ["audit", *TOY, *SMALL, "--parts", "replay,greedy", "--seed", seed, "--json", "--top-k", "20"]
        assert app.run(command) == 0
        captured = capsys.readouterr()
        found.append(json.loads(captured.out))
    assert found[0] == found[1]
    assert found[0]["parts"] != found[2]["parts"]
    assert found[0]["settings"]["top_k"] == 20
    assert [part["part"] for part in found[0]["parts"]] == ["greedy", "replay"]
    assert found[0]["parts"][1]["rows"][0]["tests"][0]["test"]["p_value"] <= 1.0


def test_exact_only_loads_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["audit", "--exact-only", "--model", "/nowhere"]) == 0
    assert "audit passed (passed: exact, faults)" in capsys.readouterr().out


def test_a_lossy_verifier_fails_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", *TOY, "--parts", "replay,statistics", "--verifier", "typical", "--lossy", "--samples", "400"]
    assert app.run([*command, "--tokens", "4", "--replays", "8000", "--temperature", "1.5"]) == 1
    out = capsys.readouterr().out
    assert "replay: FAILED" in out
    assert "statistics: FAILED" in out
    assert "another law than the target's" in out
    assert "audit FAILED (FAILED: replay, statistics)" in out


def test_a_biased_verifier_of_a_plugin_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(VERIFIERS, "biased", "audit.biased_verifiers:BiasedBy10Percent")
    command = ["audit", *TOY, "--parts", "replay", "--verifier", "biased", "--replays", "12000", "--json"]
    assert app.run(command) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_prompts_from_a_file_and_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "aba aba ab"}\n{"turns": ["cd cd c", "more"]}\n{"prompt": "third"}\n')
    command = ["audit", *TOY, *SMALL, "--parts", "greedy", "--json"]
    for extra, count in (
        (["--file", str(file), "--limit", "2"], 2),
        (["--prompt", "aba aba", "--prompt", "x y x y", "--prompt", "zz", "--also", "ngram"], 3),
    ):
        assert app.run([*command, *extra]) == 0
        rows = json.loads(capsys.readouterr().out)["parts"][0]["rows"]
        assert {row["prompts"] for row in rows} == {count}
        assert [row["drafter"] for row in rows] == ["layer_skip", "ngram"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--thorough"], "exclude each other"),
        (["--exact-only", "--parts", "exact"], "exclude each other"),
        (["--parts", "exakt"], "did you mean 'exact'"),
        (["--samples", "10"], "--samples"),
        (["--limit", "3"], "--limit works only together with --file"),
        (["--exact-only", "--prompt", "x"], "for the greedy, replay and statistics parts"),
        (["--prompt", " "], "empty"),
        (["--parts", "statistics", "--temperature", "0"], "temperature above 0"),
        (["--parts", "replay", "--verifier", "greedy"], "not exact"),
        (["--also", "ngramm"], "did you mean 'ngram'"),
        (["--verifier", "typical"], "--lossy accepts a changed output"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["audit", *TOY, *SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()[-1]) > 20


def test_temperature_0_skips_the_sampled_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["audit", *TOY, *SMALL, "--temperature", "0"]) == 0
    assert "not tested: replay, statistics" in capsys.readouterr().out.replace("\n", " ")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["audit", "--help"]) == 0
    assert "Example: outrider audit" in capsys.readouterr().out
