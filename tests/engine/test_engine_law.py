"""Invariant 2 on whole engines: above temperature 0 the law of the output is the target's own.

First by exact enumeration of prefill and steps with every random outcome on a vocabulary of 3, then by chi-square over
thousands of seeds with the real random stream.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from engine.tiny_engines import Combination, build_engine, combinations, engine_law, letters_tokenizer
from outrider.audit.enumeration import EnumeratingStream, outcomes
from outrider.engine.engine import Engine
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.types import ProposalKind, Regime
from outrider.verifiers.multi_step import MultiStep

PROMPT = [0, 1]
SAMPLED = combinations(Regime.SAMPLED)


def tiny(combination: Combination, size: int) -> Engine:
    """Order 1, soft tables, a draft model from another table; nothing ends the text."""
    target = ToyModel(size, order=1, sharpness=0.9, seed=10)
    draft = ToyModel(size, order=1, sharpness=0.9, seed=30)
    tokenizer = letters_tokenizer(size, with_end=False)
    return combination.engine(target=target, draft=draft, tokenizer=tokenizer, max_nodes=3)


def exact_law(size: int, params: SamplingParams, length: int, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Joint law of the first ``length`` tokens by the chain rule, from the model's obvious path."""
    model = ToyModel(size, order=1, sharpness=0.9, seed=10)
    pipeline = LogitsPipeline(params, size, prompt=prompt)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in law.items():
            p = pipeline.probabilities(model.logits_after([*prompt, *output]), output)
            longer |= {(*output, t): mass * float(p[t]) for t in range(size) if p[t] > 0}
        law = longer
    return law


PARAMS = {
    "bare": SamplingParams(temperature=1.0, max_tokens=3),
    "top_k, four tokens": SamplingParams(temperature=1.0, top_k=2, max_tokens=4),
    "top_p": SamplingParams(temperature=0.8, top_p=0.8, max_tokens=3),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=3),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("combination", SAMPLED, ids=str)
def test_exact_law_of_prefill_and_steps(
    monkeypatch: pytest.MonkeyPatch, combination: Combination, params: SamplingParams
) -> None:
    """U12, U13, U17, U22, U23, U50, U52: every random outcome of a short request, end to end."""
    engine = tiny(combination, 3)
    law, _ = engine_law(monkeypatch, engine, PROMPT, params)
    expected = exact_law(3, params, params.max_tokens, PROMPT)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert {k: v for k, v in law.items() if v > 1e-15}.keys() == expected.keys()
    assert max(abs(law[tokens] - mass) for tokens, mass in expected.items()) < 1e-12


def test_the_enumeration_sees_speculation_and_both_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above is worth something only if guesses are accepted, rejected and followed by a further step."""
    engine = tiny(Combination("small_model", "widths:2,1", ProposalKind.WITHOUT_REPLACEMENT, "multi_step"), 3)
    steps: Counter[tuple[int, ...]] = Counter()

    def run(stream: EnumeratingStream) -> tuple[int, ...]:
        monkeypatch.setattr("outrider.engine.engine.SeededStream", lambda seed: stream)
        result = engine.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=4))
        return tuple(record.accepted for record in result.records)

    for accepted, _ in outcomes(run):
        steps[accepted] += 1
    assert {len(path) for path in steps} >= {2, 3}
    assert {path[1] for path in steps} == {0, 1, 2}


def test_a_planted_bias_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """U13: argmax drafts judged by a softmax q (here: the residual of a rejection is not taken) shift the law."""
    monkeypatch.setattr(MultiStep, "residual", lambda self, p, q, token: p)
    combination = Combination("small_model", "widths:2,1", ProposalKind.DETERMINISTIC, "multi_step")
    with pytest.raises(AssertionError):
        test_exact_law_of_prefill_and_steps(monkeypatch, combination, PARAMS["bare"])


def test_a_seed_dependent_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping drawn guesses of low probability (planted in the shape) is not lossless, and is caught."""
    from outrider.trees.shapes.chain import Chain
    from outrider.trees.token_tree import TokenTree

    original = Chain.grow

    def dropping(self: Chain, root_token: int, source: object, limits: object) -> TokenTree:
        tree = original(self, root_token, source, limits)  # type: ignore[arg-type]
        drawn = tree.trials(0)
        is_unlikely = bool(drawn) and float(tree.trial_distribution(drawn[0])[drawn[0].token]) < 0.4
        return TokenTree(root_token, tree.kind) if is_unlikely else tree

    monkeypatch.setattr(Chain, "grow", dropping)
    combination = Combination("small_model", "chain:2", ProposalKind.IID, "multi_step")
    with pytest.raises(AssertionError):
        test_exact_law_of_prefill_and_steps(monkeypatch, combination, PARAMS["bare"])


RUNS = 3000
DETERMINISTIC, IID, WITHOUT = list(ProposalKind)[:3]
CASES: list[tuple[Combination, dict[str, float]]] = [
    (Combination("small_model", "widths:2,1", WITHOUT, "multi_step"), {"top_p": 0.9}),
    (Combination("small_model", "chain:3", IID, "multi_step"), {"frequency_penalty": 0.6, "top_p": 0.85}),
    (Combination("ngram:2,min_match=1", "chain:3", DETERMINISTIC, "multi_step"), {"repetition_penalty": 1.2}),
]


@pytest.mark.parametrize(("combination", "options"), CASES, ids=[str(case[0]) for case in CASES])
def test_frequencies_over_seeds(combination: Combination, options: dict[str, float]) -> None:
    """U12, U17, U18, U20: the first three tokens of 3000 seeds, in batches, against the exact joint law."""
    size = 5
    engine = tiny(combination, size)
    # Every token followed by its likeliest successor: an n-gram drafter has something to find, sometimes right.
    successors = [int(engine.model.logits_after([token]).argmax()) for token in range(size)]  # type: ignore[attr-defined]
    prompt = [token for pair in enumerate(successors) for token in pair] * 2
    base = SamplingParams(temperature=0.9, max_tokens=3, **options)  # type: ignore[arg-type]
    requests = [(seed, prompt, base.model_copy(update={"seed": seed})) for seed in range(RUNS)]
    results = [result for _, result in engine.run(requests, batch=8)]
    assert sum(result.stats.num_accepted_tokens for result in results) > RUNS / 20
    counts = Counter(result.tokens for result in results)
    law = exact_law(size, base, 3, prompt)
    assert counts.keys() <= law.keys()
    # Rare outcomes are pooled, as the chi-square approximation asks for.
    common = [tokens for tokens in law if law[tokens] * RUNS >= 5]
    observed = np.array([counts[tokens] for tokens in common], dtype=float)
    expected = np.array([law[tokens] * RUNS for tokens in common])
    observed, expected = np.append(observed, RUNS - observed.sum()), np.append(expected, RUNS - expected.sum())
    keep = expected > 1e-9
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_sampling_at_a_low_temperature_is_greedy() -> None:
    """U15, U17: the target's temperature reaches p at every node: at 0.01 nothing but the best token comes."""
    fast, plain = build_engine("small_model", "widths:2,2"), build_engine("none")
    cold = SamplingParams(temperature=0.005, max_tokens=20, seed=1, ignore_eos=True)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    assert fast.generate([3], cold).tokens == plain.generate([3], greedy).tokens
