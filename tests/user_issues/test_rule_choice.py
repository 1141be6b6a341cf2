"""The rule that judges the guesses decides how many of them are kept."""

from __future__ import annotations

import torch

from engine.tiny_engines import build_engine, letters_tokenizer
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind
from outrider.verifiers.multi_step import MultiStep
from outrider.verifiers.sample_match import SampleMatch
from verifiers.one_position import first_token


def test_rule_choice_flat_distributions_u25() -> None:
    """At temperature 1 guesses were kept only if the target happened to draw them: under 1%, slower than without.

    The default rule uses that a guess was drawn with q close to p: on 20 nearly equal tokens it keeps most of them,
    where matching samples keeps one in twenty; the law is p under both.
    """
    source = torch.Generator().manual_seed(25)
    p, q = ((w := torch.rand(20, dtype=torch.float64, generator=source) + 4.0) / w.sum() for _ in range(2))
    kept = {}
    for rule in (MultiStep(), SampleMatch()):
        law, kept[type(rule)] = first_token(rule, p, q, 1, ProposalKind.IID)
        assert torch.allclose(law, p, atol=1e-12, rtol=0)
    assert kept[MultiStep] > 0.85
    assert kept[SampleMatch] < 0.06
    target, draft = ToyModel(30, sharpness=0.15), ToyModel(30, sharpness=0.15, noise=0.5)
    params = SamplingParams(temperature=1.0, top_k=20, max_tokens=80, seed=25)
    rates = {}
    for verifier in (None, "sample_match"):
        options = {"target": target, "draft": draft, "tokenizer": letters_tokenizer(30, with_end=False)}
        engine = build_engine("small_model", "chain:4", None, verifier, **options)  # type: ignore[arg-type]
        stats = engine.generate([1], params).stats
        rates[verifier] = stats.num_accepted_tokens / stats.num_draft_tokens
    assert rates[None] > 5 * rates["sample_match"]
