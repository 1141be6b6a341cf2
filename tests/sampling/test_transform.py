"""The logits pipeline against slow, obvious references and against transformers' processors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline, truncate

VOCAB = 40


def pipeline(stop: frozenset[int] = frozenset(), prompt: tuple[int, ...] = (), size: int = VOCAB, **values: object):
    return LogitsPipeline(SamplingParams.parse(**values), size, stop, prompt)


def random_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    return 3.0 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def reference_logits(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """One token at a time, straight from the definitions."""
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.presence_penalty * (1 if token in output else 0)
        logit -= params.frequency_penalty * output.count(token)
        logit += params.logit_bias.get(token, 0.0)
        result.append(logit)
    return result


@pytest.mark.parametrize("seed", range(6))
def test_penalties_and_bias_match_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    logits = random_logits(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(10)]
    output = [rng.randrange(VOCAB) for _ in range(12)]
    made = pipeline(
        prompt=tuple(prompt),
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=-0.2,
        logit_bias={3: 2.0, 7: -1.5},
    )
    expected = reference_logits(logits.tolist(), prompt, output, made.params)
    same(made.process(logits, output), torch.tensor(expected, dtype=torch.float64))


def test_process_leaves_its_input_alone() -> None:
    logits = random_logits(0)
    before = logits.clone()
    made = pipeline(
        stop=frozenset({2}), repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={1: 5.0}, min_tokens=9
    )
    made.probabilities(logits, [1, 2, 3])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_is_a_softmax_of_scaled_logits(temperature: float) -> None:
    logits = random_logits(1)
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    expected = torch.tensor([w / sum(weights) for w in weights], dtype=torch.float64)
    same(pipeline(temperature=temperature).probabilities(logits, []), expected)


def test_temperature_zero_is_one_hot_on_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[5, 9, 30]] = 2.0
    p = pipeline(temperature=0.0).probabilities(logits, [])
    assert p.dtype is torch.float64
    assert p.nonzero().flatten().tolist() == [5]
    assert float(p.sum()) == 1.0


def test_temperature_zero_sees_penalties() -> None:
    logits = torch.zeros(VOCAB)
    logits[4], logits[6] = 2.0, 1.5
    made = pipeline(temperature=0.0, frequency_penalty=1.0)
    assert made.greedy_token(logits, []) == 4
    assert made.greedy_token(logits, [4]) == 6
    assert made.probabilities(logits, [4]).argmax() == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_probabilities_are_float64_and_sum_to_one(dtype: torch.dtype) -> None:
    p = pipeline(temperature=0.9, top_p=0.9, min_p=0.01).probabilities(random_logits(2).to(dtype), [1])
    assert p.dtype is torch.float64
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("temperature", [1e-310, 1e-300, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tiny_temperatures_give_finite_probabilities(temperature: float, dtype: torch.dtype) -> None:
    """Logits over a tiny temperature overflow: all mass goes to the best tokens, in equal parts where they tie."""
    logits = random_logits(4).to(dtype)
    logits[[5, 9]] = 50.0
    p = pipeline(temperature=temperature, top_p=0.99).probabilities(logits, [])
    assert bool(torch.isfinite(p).all())
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-14)
    assert {i: float(p[i]) for i in p.nonzero().flatten().tolist()} == {5: 0.5, 9: 0.5}


@pytest.mark.parametrize("bias", [3e38, 1e308, -3e38, -1e308])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_huge_logit_bias_gives_finite_probabilities(bias: float, dtype: torch.dtype) -> None:
    logits = random_logits(4).to(dtype)
    made = pipeline(temperature=0.5, logit_bias={7: bias, 8: bias})
    p = made.probabilities(logits, [])
    assert bool(torch.isfinite(p).all())
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-14)
    assert float(p[[7, 8]].sum()) == pytest.approx(1.0 if bias > 0 else 0.0, abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_k", [1, 5, 39, 40, 100])
def test_top_k_matches_transformers(seed: int, top_k: int) -> None:
    logits = random_logits(seed)
    expected = torch.softmax(TopKLogitsWarper(top_k)(None, logits[None])[0], -1)
    same(pipeline(temperature=1.0, top_k=top_k).probabilities(logits, []), expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_matches_transformers(seed: int, top_p: float) -> None:
    logits = random_logits(seed)
    expected = torch.softmax(TopPLogitsWarper(top_p)(None, logits[None])[0], -1)
    same(pipeline(temperature=1.0, top_p=top_p).probabilities(logits, []), expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_matches_transformers(seed: int, min_p: float) -> None:
    logits = random_logits(seed)
    expected = torch.softmax(MinPLogitsWarper(min_p)(None, logits[None])[0], -1)
    same(pipeline(temperature=1.0, min_p=min_p).probabilities(logits, []), expected)


@pytest.mark.parametrize("seed", range(5))
def test_all_truncations_together_match_transformers(seed: int) -> None:
    logits = random_logits(seed)
    scores = logits[None] / 0.8
    for warper in (TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)):
        scores = warper(None, scores)
    made = pipeline(temperature=0.8, top_k=12, top_p=0.9, min_p=0.1)
    same(made.probabilities(logits, []), torch.softmax(scores[0], -1))


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    logits = random_logits(8)
    prompt, output = (1, 5, 5, 30), [7, 5]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), logits[None].clone())[0]
    same(pipeline(prompt=prompt, repetition_penalty=penalty).process(logits, output), expected)


def test_top_k_breaks_ties_by_token_id() -> None:
    p = truncate(torch.tensor([0.1, 0.3, 0.3, 0.3], dtype=torch.float64), top_k=2)
    assert p.tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.1, [2]), (0.40625, [2]), (0.41, [0, 2]), (0.71875, [0, 2]), (0.72, [0, 2, 3]), (0.95, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: list[int]) -> None:
    """Binary fractions, so that a set can reach p exactly."""
    p = torch.tensor([0.3125, 0.09375, 0.40625, 0.1875], dtype=torch.float64)
    assert truncate(p, top_p=top_p).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("seed", range(4))
def test_top_p_against_the_definition(seed: int) -> None:
    p = torch.softmax(random_logits(seed), -1)
    for top_p in (0.2, 0.6, 0.97):
        chosen: list[int] = []
        for token in sorted(range(VOCAB), key=lambda t: (-float(p[t]), t)):
            chosen.append(token)
            if sum(float(p[t]) for t in chosen) >= top_p:
                break
        assert sorted(chosen) == truncate(p, top_p=top_p).nonzero().flatten().tolist()


def test_the_best_token_always_stays() -> None:
    p = torch.softmax(random_logits(3), -1)
    best = int(p.argmax())
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-9, "min_p": 1.0}):
        kept = truncate(p, **options)
        assert kept.nonzero().flatten().tolist() == [best]
        assert float(kept[best]) == 1.0


def test_no_truncation_returns_the_distribution_unchanged() -> None:
    p = torch.softmax(random_logits(4), -1)
    assert torch.equal(truncate(p), p)
    assert torch.equal(truncate(p, top_k=VOCAB + 5), p)


def test_min_tokens_masks_every_stop_token_until_enough_are_out() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 8]] = 50.0
    made = pipeline(stop=frozenset({3, 8, VOCAB + 4}), temperature=1.0, min_tokens=2)
    for output in ([], [1]):
        p = made.probabilities(logits, output)
        assert float(p[3]) == float(p[8]) == 0.0
        assert made.greedy_token(logits, output) not in (3, 8)
    assert float(made.probabilities(logits, [1, 1])[[3, 8]].sum()) > 0.99
    assert made.greedy_token(logits, [1, 1]) == 3


def test_padding_rows_are_never_emitted() -> None:
    logits = torch.zeros(VOCAB + 24)
    logits[VOCAB:] = 100.0
    for temperature in (0.0, 1.0):
        made = pipeline(temperature=temperature, repetition_penalty=1.5, prompt=(VOCAB + 3,))
        assert made.probabilities(logits, [VOCAB + 1]).shape == (VOCAB,)
        assert made.greedy_token(logits, []) < VOCAB


def test_uses_history_tells_which_parameters_need_it() -> None:
    assert not pipeline(temperature=1.0, top_k=3, logit_bias={1: 1.0}).uses_history
    for name, value in (
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", 0.1),
        ("min_tokens", 1),
    ):
        assert pipeline(**{name: value}).uses_history
