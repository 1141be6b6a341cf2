"""The 60-prompt greedy sweep (make test-slow, about half an hour): every combination leaves the output unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import outrider
from outrider.audit.sweep import greedy_sweep

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
DATA = ROOT.parent / "shared" / "data" / "spec_bench.jsonl"
SAMPLE = ROOT / "tests" / "data" / "spec_bench_24.jsonl"


@pytest.mark.slow
@pytest.mark.real
def test_every_combination_leaves_greedy_output_unchanged() -> None:
    from benchmark import groups_of, sweep_combinations

    base, combinations = sweep_combinations()
    groups = groups_of(DATA, 10) if DATA.exists() else groups_of(SAMPLE, 4)
    prompts = [base.encode(text) for texts in groups.values() for text in texts]
    rows = greedy_sweep(base, prompts, combinations, 64)
    assert len(rows) == len(combinations) >= 8
    assert [(row.drafter, row.shape, comparison) for row in rows for _, comparison in row.unexplained] == []
    assert all(row.accepted > 0 for row in rows)


@pytest.mark.real
def test_the_sweep_finds_a_planted_divergence() -> None:
    """A sweep whose candidate decodes another prompt's continuation must report it."""

    class Shifted:
        def __init__(self, engine: outrider.Engine) -> None:
            self.engine = engine

        def generate(self, prompt: list[int], params: outrider.SamplingParams) -> outrider.Result:
            return self.engine.generate([*prompt[:-2], 28, *prompt[-2:]], params)

    engine = outrider.load("toy", drafter="ngram")
    (row,) = greedy_sweep(engine, [engine.encode("hello there")], [(Shifted(engine), "shifted", "-")], 16)  # type: ignore[list-item]
    assert len(row.unexplained) == 1
    assert row.equal_tokens < row.tokens
