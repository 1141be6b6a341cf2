"""What ships for the default model: loads, leaves greedy output as it is, keeps as many tokens as it did when it was
trained (vllm#26191: acceptance lengths fall silently otherwise).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import SamplingParams, compare_outputs
from outrider.engine.engine import Engine
from outrider.models.shipped import shipped_models

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "src" / "outrider" / "data"
FLOORS: dict[str, Any] = json.loads((Path(__file__).parent / "acceptance_floors.json").read_text())
"""Mean acceptance length on eight of the prompts, 32 tokens each, less a tenth for rounding of another machine."""
LARGEST = 25_000_000


@pytest.mark.parametrize("name", sorted(FLOORS))
def test_a_shipped_head_keeps_what_it_kept(name: str, int4_engine: Engine, prompts: list[list[int]]) -> None:
    arm = FLOORS[name]
    models = arm.get("draft_model")
    if models is None:
        engine = int4_engine.with_parts(drafter=arm["drafter"], shape=arm.get("shape"))
    else:
        engine = outrider.load(
            "smollm2-135m",
            drafter=arm["drafter"],
            shape=arm.get("shape"),
            draft_model=models,
            dtype="bfloat16",
            adaptive=False,
        )
    passes = kept = 0
    for prompt in prompts[::3]:
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        result = engine.generate(prompt, params)
        plain = int4_engine.plain().generate(prompt, params)
        comparison = compare_outputs(int4_engine, prompt, plain.tokens, result.tokens)
        assert comparison.is_identical or comparison.is_near_tie, comparison.describe()
        passes += result.stats.num_drafts
        kept += result.stats.num_accepted_tokens + result.stats.num_drafts
    assert kept / passes >= 0.9 * arm["acceptance"], f"{name} keeps {kept / passes:.2f} tokens a pass"


def test_every_shipped_head_has_a_floor_and_is_small() -> None:
    index = json.loads((DATA / "heads" / "index.json").read_text())
    files = {DATA / "heads" / file for entry in index.values() for file in entry["heads"].values()}
    files |= {model.directory / "model.safetensors" for model in shipped_models().values()}
    assert files == set((DATA / "heads").rglob("*.safetensors")) | set((DATA / "small_models").rglob("*.safetensors"))
    assert all(file.stat().st_size < LARGEST for file in files)
    measured = {str(arm["drafter"]).partition(":")[0] for arm in FLOORS.values()}
    assert {method for entry in index.values() for method in entry["heads"]} <= measured
    named = {name for arm in FLOORS.values() for name in str(arm.get("draft_model", "")).split(",") if name}
    assert set(shipped_models()) <= named


def test_auto_is_what_the_index_says(int4_engine: Engine) -> None:
    index = json.loads((DATA / "heads" / "index.json").read_text())
    expected = [entry["default"][0].replace("{guesses}", "3") for entry in index.values()]  # the 4-bit kernel's block
    assert [int4_engine.with_parts(drafter="auto").config.drafter] == expected
