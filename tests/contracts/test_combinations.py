"""Invariant 1: greedy output is the target's own, whatever the drafter, the shape, the proposal, the batch.

Every case is discovered from the registry: a new drafter, shape or verifier is tested here without an edit.
"""

from __future__ import annotations

import pytest

from engine.tiny_engines import Combination, build_engine, combinations, random_prompts
from outrider.engine.engine import Engine
from outrider.engine.registry import DRAFTERS, SHAPES
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime
from outrider.verifiers.base import TargetDistributions, Verdict
from outrider.verifiers.greedy import Greedy

GREEDY = combinations(Regime.GREEDY)
PROMPTS = random_prompts(8, 12)
PARAMS = {
    "bare": SamplingParams(max_tokens=24),
    "ignore_eos": SamplingParams(max_tokens=24, ignore_eos=True),
    "repetition": SamplingParams(max_tokens=16, repetition_penalty=1.3),
    "counts": SamplingParams(max_tokens=16, presence_penalty=0.7, frequency_penalty=0.9),
    "bias": SamplingParams(max_tokens=16, logit_bias={3: 2.0, 5: -4.0, 0: 1.0}),
    "min_tokens": SamplingParams(max_tokens=16, min_tokens=9, logit_bias={0: 3.0}),
}


def plain_outputs(target: ToyModel | None, params: SamplingParams, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The reference, written without the engine: one row at a time through the model's obvious path."""
    model = target or ToyModel(vocab_size=12, order=2, seed=3)
    return [reference(model, params, prompt) for prompt in prompts]


def reference(model: ToyModel, params: SamplingParams, prompt: list[int]) -> tuple[int, ...]:
    """Plain greedy decoding with every parameter applied by hand (float64, lowest id wins a tie)."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = model.logits_after([*prompt, *output])
        for token in set(prompt + output):
            value = logits[token]
            logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        for token in set(output):
            logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if len(output) < params.min_tokens and not params.ignore_eos:
            logits[0] = float("-inf")
        output.append(int(logits.argmax()))
        if output[-1] == 0 and not params.ignore_eos and len(output) >= params.min_tokens:
            break
    return tuple(output)


def test_discovery_finds_every_part() -> None:
    """Skipping what is illegal must not hide a part; parts that need trained files may be missing here."""
    assert {c.drafter.partition(":")[0] for c in GREEDY} >= {"none", "ngram", "small_model", "layer_skip", "replay"}
    assert {c.shape.partition(":")[0] for c in GREEDY} == set(SHAPES)
    assert {c.proposal for c in GREEDY} >= set(ProposalKind) - {ProposalKind.PER_SOURCE}
    assert {c.drafter.partition(":")[0] for c in combinations(Regime.SAMPLED)} <= set(DRAFTERS)


@pytest.mark.parametrize("combination", GREEDY, ids=str)
def test_greedy_output_is_plain(combination: Combination) -> None:
    """U06, U08, U09, U60: every legal combination, several prompts, penalties, bias and min_tokens on."""
    engine = combination.engine()
    for name, params in PARAMS.items():
        for prompt, expected in zip(PROMPTS[:2], plain_outputs(None, params, PROMPTS[:2]), strict=True):
            assert engine.generate(prompt, params).tokens == expected, (name, prompt)


@pytest.mark.parametrize("combination", GREEDY, ids=str)
def test_greedy_output_does_not_depend_on_the_batch(combination: Combination) -> None:
    """U26 at temperature 0: ragged requests with different parameters, in batches of 1 to 5."""
    engine = combination.engine()
    every = list(PARAMS.values())
    requests = [(i, prompt, every[i % len(every)]) for i, prompt in enumerate(PROMPTS[:6])]
    expected = {i: plain_outputs(None, params, [prompt])[0] for i, prompt, params in requests}
    for batch in (1, 2, 3, 5):
        assert {key: result.tokens for key, result in engine.run(requests, batch=batch)} == expected


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("max_nodes", [0, 1, 2, 3, 5, 16, 64])
@pytest.mark.parametrize(
    ("drafter", "shape"), [("small_model", "widths:2,2,2"), ("ngram", "widths:3,2"), ("replay:1.0", "chain:8")]
)
def test_node_budget_does_not_change_the_text(drafter: str, shape: str, max_nodes: int, adaptive: bool) -> None:
    """U09: any budget, controller on or off; the budget itself is kept."""
    engine = build_engine(drafter, shape, max_nodes=max_nodes, adaptive=adaptive)
    params = PARAMS["ignore_eos"]
    for prompt, expected in zip(PROMPTS[:2], plain_outputs(None, params, PROMPTS[:2]), strict=True):
        result = engine.generate(prompt, params)
        assert result.tokens == expected
        assert max(record.drafted for record in result.records) <= max_nodes


@pytest.mark.parametrize("drafter", ["ngram", "small_model", "layer_skip", "replay:0.8"])
def test_whole_prefix_and_sliding_window_targets(drafter: str) -> None:
    """U01, U61: a target that sees everything, and one that sees a window of 5, generated far past the window."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for target in (ToyModel(vocab_size=12), ToyModel(vocab_size=12, window=5)):
        draft = ToyModel(vocab_size=12, window=target.window, noise=0.3) if drafter == "small_model" else None
        engine = build_engine(drafter, "widths:2,2,1", target=target, draft=draft)
        for prompt, expected in zip(PROMPTS[:4], plain_outputs(target, params, PROMPTS[:4]), strict=True):
            assert engine.generate(prompt, params).tokens == expected


def test_drafts_are_really_accepted() -> None:
    """Equality above is worth something only if guesses were kept: each source, on text that suits it."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for drafter in ("ngram", "small_model", "layer_skip", "replay:1.0"):
        stats = build_engine(drafter, "widths:2,2,1").generate(PROMPTS[0], params).stats
        assert stats.num_accepted_tokens > 10, drafter
    assert stats.mean_acceptance_length > 3.5


def test_a_verifier_that_keeps_any_child_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """U10: a greedy tree that accepts a plausible child (planted) changes the text, so the suite above would fail."""

    def verify(self: Greedy, tree: TokenTree, target: TargetDistributions, random: object, position: int) -> Verdict:
        children = list(tree.children(0).values())
        return (
            Verdict((children[-1],), target.greedy_token(children[-1]))
            if children
            else Verdict((), target.greedy_token(0))
        )

    monkeypatch.setattr(Greedy, "verify", verify)
    engine = build_engine("small_model", "widths:2,2,1")
    assert _outputs(engine) != plain_outputs(None, PARAMS["bare"], PROMPTS)


def _outputs(engine: Engine) -> list[tuple[int, ...]]:
    return [engine.generate(prompt, PARAMS["bare"]).tokens for prompt in PROMPTS]


def test_the_best_child_missing_is_a_rejection() -> None:
    """U10: the oracle offers the second best only; nothing is accepted and the text is the target's."""
    result = build_engine("replay:0.0", "widths:2,1").generate(PROMPTS[1], PARAMS["ignore_eos"])
    assert result.stats.num_draft_tokens > 0
    assert result.stats.num_accepted_tokens == 0
    assert result.tokens == plain_outputs(None, PARAMS["ignore_eos"], [PROMPTS[1]])[0]
