"""Guessing along a recorded answer counts what decoding counts."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, random_prompts
from outrider.engine.recorded import guess_along
from outrider.sampling.params import SamplingParams

LIMIT = 40


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [
        ("ngram", "chain:4"),
        ("suffix", None),
        ("eagle3:random", "best_first:6,preset=eagle2"),
        ("eagle:random", "chain:3"),
        ("hybrid:(ngram@chain:2)+(eagle3:random@chain:2)", None),
        ("ensemble:ngram@chain:2+eagle3:random@chain:2", None),
        ("none", None),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_counts_are_those_of_decoding(drafter: str, shape: str | None, ignore_eos: bool) -> None:
    engine = build_engine(drafter, shape)
    for prompt in random_prompts(4, 12, seed=11):
        result = engine.generate(prompt, SamplingParams(max_tokens=LIMIT, ignore_eos=ignore_eos))
        found = guess_along(engine, prompt, list(result.tokens), LIMIT)
        assert found.passes == result.stats.num_steps
        # Without end tokens guesses may name one, so only complete answers have the same guesses near their end.
        assert found.accepted == sum(record.accepted for record in result.records)
        assert found.drafted == result.stats.num_draft_tokens
