"""SpecExec's sample matching: the text of a seed is plain sampling's text, whatever was drafted."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, combinations, random_prompts
from outrider.engine.registry import VERIFIERS
from outrider.sampling.params import SamplingParams
from outrider.types import Regime

PROMPTS = random_prompts(3, 12, seed=8)
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=24),
]
DRAFTED = [parts for parts in combinations(Regime.SAMPLED) if parts.verifier == "sample_match"]


def texts(verifier: str | None, drafter: str, **parts: object) -> list[tuple[int, ...]]:
    engine = build_engine(drafter, verifier=verifier, **parts)  # type: ignore[arg-type]
    return [
        engine.generate(prompt, params.model_copy(update={"seed": seed})).tokens
        for seed, prompt in enumerate(PROMPTS)
        for params in PARAMS
    ]


@pytest.mark.parametrize("parts", DRAFTED, ids=str)
def test_a_seed_gives_the_text_of_plain_sampling(parts: object) -> None:
    """Every drafter, shape and proposal kind; plain decoding goes through multi_step at a root without children."""
    engine_parts = {name: getattr(parts, name) for name in ("drafter", "shape", "proposal", "verifier")}
    assert texts(**engine_parts) == texts(None, "none")


def test_the_equality_is_not_for_want_of_guesses() -> None:
    engine = build_engine("small_model", "widths:3,2,1", verifier="sample_match")
    stats = engine.generate(PROMPTS[0], PARAMS[0].model_copy(update={"seed": 1})).stats
    assert stats.num_accepted_tokens > 5
    assert "sample_match" in VERIFIERS
    # Multi-step spends its own draws on accept tests: same law, other text.
    assert texts("multi_step", "small_model", shape="widths:3,2,1") != texts(None, "none")
