"""The cascade: the same proposals as the small model alone, in fewer passes of it."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, random_prompts
from outrider.drafters.small_model import SmallModelSession
from outrider.engine.engine import Engine
from outrider.models.base import Segment, SegmentOutput
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import ToyCache
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Regime, StepRecord

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=11)


def trees(engine: Engine, params: SamplingParams, prompt: list[int]) -> list[tuple[object, ...]]:
    """What every step drafted and accepted."""

    def read(record: StepRecord) -> tuple[object, ...]:
        return record.tokens, record.parents, record.accepted_path, record.emitted

    return [read(record) for record in engine.generate(prompt, params).records]


@pytest.mark.parametrize("cheap", ["ngram", "replay:0.6@chain:3", "layer_skip:2@widths:2,1", "none"])
@pytest.mark.parametrize(
    ("shape", "proposal"),
    [
        ("chain:5", ProposalKind.DETERMINISTIC),
        ("chain:5", ProposalKind.IID),
        ("widths:2,2,1", ProposalKind.DETERMINISTIC),
        ("widths:2,2,1", ProposalKind.WITHOUT_REPLACEMENT),
    ],
)
def test_proposals_are_the_small_models_own(cheap: str, shape: str, proposal: ProposalKind) -> None:
    """Whatever the cheap drafter guesses, the same seed gives the same trees: its guesses only save passes."""
    for prompt in random_prompts(3, 12, seed=6):
        for params in (GREEDY, SAMPLED):
            expected = trees(build_engine("small_model", shape, proposal), params, prompt)
            assert trees(build_engine(f"cascade:{cheap}", shape, proposal), params, prompt) == expected


def passes(monkeypatch: pytest.MonkeyPatch, drafter: str, draft: ToyModel) -> int:
    count = 0
    original = ToyModel.forward

    def counting(self: ToyModel, segments: list[Segment], *rest: object, **named: object) -> list[SegmentOutput]:
        nonlocal count
        count += self is draft
        return original(self, segments, *rest, **named)  # type: ignore[arg-type]

    engine = build_engine(drafter, "chain:5", draft=draft)
    with monkeypatch.context() as patch:
        patch.setattr(ToyModel, "forward", counting)
        engine.generate(random_prompts(1, 12, seed=6)[0], GREEDY)
    return count


def test_right_guesses_save_passes_of_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model like the target and a cheap drafter that knows the target: one pass a proposal instead of five."""
    draft = ToyModel(vocab_size=12, order=2, seed=3)
    alone = passes(monkeypatch, "small_model", draft)
    helped = passes(monkeypatch, "cascade:replay:1.0@chain:5", draft)
    useless = passes(monkeypatch, "cascade:none", draft)
    assert helped * 4 <= alone
    assert alone <= useless <= alone + 1  # the prompt is read in a pass of its own


def test_the_draft_cache_covers_the_committed_text() -> None:
    engine = build_engine("cascade:ngram", "chain:4")
    session = engine.new_session()
    prompt = random_prompts(1, 12, seed=2)[0] * 9
    text = [*prompt, *engine.generate(prompt, GREEDY, session).tokens]
    (draft,) = session.drafts.values()
    assert isinstance(draft, SmallModelSession)
    assert isinstance(draft.cache, ToyCache)
    assert draft.cache.scratch == 0
    assert len(prompt) < draft.cache.length <= len(text)
    assert list(draft.cache.tokens) == text[: draft.cache.length]
    assert engine._lanes[Regime.GREEDY].plan.draft.draft_models == 1
