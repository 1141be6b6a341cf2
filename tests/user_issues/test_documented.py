"""Questions that users had to ask: the answer must stand in the documentation, and be true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine.tiny_engines import build_engine
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Topology
from outrider.verifiers.multi_step import MultiStep
from user_issues.toy_decoding import plain_text
from verifiers.one_position import distance, first_token, random_pairs

DOCS = Path(__file__).resolve().parents[2] / "docs"


def says(page: str, sentence: str) -> bool:
    """Whether the page holds the sentence, line breaks and emphasis apart."""
    text = re.sub(r"\s+", " ", (DOCS / page).read_text().replace("*", ""))
    return sentence in text


def test_documented_greedy_guarantee_u06() -> None:
    """Greedy output differed under speculation, and nobody could say what had been promised.

    The page of guarantees says what is promised at temperature 0, on what grounds, and what finite precision does.
    """
    assert says(
        "guarantees.md",
        "The output is a function of the prompt and the target alone, whatever drafter, shape, schedule or batch.",
    )
    assert says("guarantees.md", "These statements are about real numbers.")
    assert says("guarantees.md", "Where the target's two best logits are closer than that, either token is its argmax")
    assert says("guarantees.md", "Within the tolerance of `src/outrider/audit/divergence.py`")
    target = ToyModel(vocab_size=12)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for drafter, shape in (("ngram:min_match=1", "chain:4"), ("layer_skip", "widths:2,2"), ("suffix", "chain:8")):
        engine = build_engine(drafter, shape, target=target)
        for _, result in engine.run([(i, [4, 2, 4], params) for i in range(3)], batch=3):
            assert result.tokens == plain_text(target, [4, 2, 4], 20)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_documented_q_of_fixed_and_drawn_guesses_u23(k: int) -> None:
    """Why is q 1 for the best k guesses, and why is it renormalised for draws without replacement?

    The method's page says so, and the law of the token is p in every regime, k guesses wide.
    """
    page = "methods/multi_step.md"
    assert says(page, "A deterministic trial has a one-hot q: it is accepted with probability p(x)")
    assert says(page, "its rejection sets p(x) to 0")
    assert says(page, "A trial without replacement brings q with the earlier siblings removed and renormalised.")
    kinds = (ProposalKind.DETERMINISTIC, ProposalKind.WITHOUT_REPLACEMENT, ProposalKind.IID)
    assert {kind for kind, topology, _ in MultiStep.exact_for if topology is Topology.TREE} >= set(kinds)
    for kind in kinds:
        accepted = 0.0
        for p, q in random_pairs(4, seed=23, sizes=(4,)):
            law, share = first_token(MultiStep(), p, q, k, kind)
            assert distance(p, law) < 1e-12
            accepted += share
        assert accepted > 0.5
    # One and the same guesses, judged by the softmax q instead of a one-hot one, would not give p.
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.3, 0.6, 0.1]).double()
    assert first_token(MultiStep(), p, q, 1, ProposalKind.DETERMINISTIC)[1] == pytest.approx(float(p[1]))


def test_documented_seed_at_temperature_zero_u28() -> None:
    """A user changed the seed at temperature 0 and expected another text.

    It must not change, and the page says so.
    """
    assert says("guarantees.md", "At temperature 0 the seed changes nothing.")
    for drafter in ("none", "small_model", "replay:0.5", "ngram"):
        engine = build_engine(drafter, "widths:2,2")
        texts = {
            engine.generate([3, 5], SamplingParams(max_tokens=16, seed=seed, ignore_eos=True)).tokens
            for seed in range(10)
        }
        assert len(texts) == 1
