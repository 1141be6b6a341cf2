"""Any two requests of different kinds share a batch without changing each other (invariant 7, float64: identical)."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from engine.tiny_engines import build_engine, random_prompts
from outrider.engine.engine import Engine
from outrider.sampling.params import SamplingParams

PROMPTS = random_prompts(2, 12, seed=17)
KINDS = {
    "greedy": SamplingParams(max_tokens=14),
    "greedy, penalised": SamplingParams(max_tokens=14, repetition_penalty=1.4, frequency_penalty=0.6),
    "greedy, min_tokens and logprobs": SamplingParams(max_tokens=14, min_tokens=6, logprobs=3),
    "sampled": SamplingParams(max_tokens=14, temperature=1.0, seed=3),
    "sampled, truncated": SamplingParams(max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, seed=4),
    "sampled, penalised": SamplingParams(max_tokens=14, temperature=1.2, presence_penalty=0.8, seed=5),
    "sampled, stop tokens": SamplingParams(max_tokens=14, temperature=1.0, stop_token_ids=(5, 7), seed=6),
    "stop string": SamplingParams(max_tokens=14, stop=("c",), ignore_eos=True),
    "biased, one token": SamplingParams(max_tokens=1, logit_bias={3: 9.0}),
}
DRAFTERS = [
    ("none", "chain:1"),
    ("ngram", "chain:4"),
    ("suffix", "best_first:6"),
    ("small_model", "widths:2,2"),
    ("layer_skip", "chain:3"),
    ("lookahead", "widths:3,1"),
    ("ensemble:ngram+layer_skip", "chain:3"),
    ("hybrid:ngram+layer_skip", "chain:3"),
    ("cascade", "widths:2,1"),
    ("cross_tokenizer", "chain:3"),
]


def outcome(engine: Engine, batch: int, first: str, second: str) -> dict[object, tuple[object, ...]]:
    requests = [(index, PROMPTS[index], KINDS[name]) for index, name in enumerate((first, second))]
    return {
        key: (result.tokens, result.text, result.finish_reason, result.logprobs)
        for key, result in engine.run(requests, batch=batch)
    }


@pytest.mark.parametrize(("drafter", "shape"), DRAFTERS)
def test_any_two_kinds_in_one_batch(drafter: str, shape: str) -> None:
    engine = build_engine(drafter, shape)
    for first, second in combinations_with_replacement(KINDS, 2):
        assert outcome(engine, 2, first, second) == outcome(engine, 1, first, second), (first, second)
