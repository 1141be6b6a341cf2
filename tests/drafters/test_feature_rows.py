"""Which rows and names a recurrent head's inputs come from: spikes that say where they were, and real decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from contracts.tiny_models import IMPLEMENTATIONS
from drafters.test_feature_session import METHODS, PARAMS, PROMPTS, VOCABULARY, Watch, check, engine_of
from engine.tiny_engines import build_engine, letters_tokenizer, random_prompts
from outrider.drafters.base import DraftBudget, DraftContext, Observation
from outrider.drafters.feature_session import RecurrentHeadSession
from outrider.heads.cached import CachedHead, HeadCache
from outrider.heads.network import RecurrentNetwork
from outrider.models.base import FULL, Segment, Sublayers
from outrider.models.toy import ToyModel
from outrider.models.toy_cache import IntArray
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.types import Regime


class SpikeModel(ToyModel):
    """Hidden states that say where they come from: [name, row, last token, 0, ...]; embeddings are [token, ...]."""

    def _hidden(self, view: IntArray, name: str | int, skip: Sublayers = FULL) -> torch.Tensor:
        code = 100.0 if name == "final" else float(name)
        return torch.tensor([code, len(view) - 1.0, float(view[-1]), 0, 0, 0, 0, 0], dtype=torch.float64)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.double()[..., None].expand(*tokens.shape, self.hidden_size)


@pytest.mark.parametrize("method", METHODS)
def test_the_pair_at_row_t_is_features_t_and_token_t_plus_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """heads.md section 4, item 10: every hidden state arrives under its own name, in its own row, at position t."""
    engine = engine_of(tmp_path, method, "widths:2,2", SpikeModel(VOCABULARY, order=1, seed=4))
    network = engine._lanes[Regime.GREEDY].drafter.head.network
    rows: list[tuple[int, int]] = []  # row of the features and token at that row, in the order of fuse
    pairs: list[tuple[int, int]] = []  # position and token given to the head
    fuse, forward = type(network).fuse, CachedHead.forward

    def fused(self: RecurrentNetwork, features: dict[str | int, torch.Tensor]) -> torch.Tensor:
        names = self.config.features
        for name in names:
            assert features[name][:, 0].unique().tolist() == [100.0 if name == "final" else float(name)]
            assert torch.equal(features[name][:, 1:3], features[names[0]][:, 1:3])
        rows.extend((int(row), int(token)) for row, token in features[names[0]][:, 1:3].tolist())
        return fuse(self, features)

    def forwarded(
        self: CachedHead,
        cache: HeadCache,
        token: torch.Tensor,
        state: torch.Tensor,
        positions: Sequence[int],
        mask: object = None,
    ) -> torch.Tensor:
        if mask is None:
            pairs.extend(zip(positions, token[:, 0].int().tolist(), strict=True))
        return forward(self, cache, token, state, positions, mask)  # type: ignore[arg-type]

    monkeypatch.setattr(type(network), "fuse", fused)
    monkeypatch.setattr(CachedHead, "forward", forwarded)
    result = engine.generate(PROMPTS[0], PARAMS)
    text = [*PROMPTS[0], *result.tokens]
    count = len(rows)
    assert count > len(PROMPTS[0]) + 5
    assert rows == [(t, text[t]) for t in range(count)]
    assert pairs == [(t, text[t + 1]) for t in range(count)]


# -- a text whose beginning was never observed -------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_joins_late_starts_at_the_first_row_it_sees(tmp_path: Path, method: str) -> None:
    engine = engine_of(tmp_path, method, "widths:2,2")
    session = engine._lanes[Regime.GREEDY].drafter.new_session()
    assert isinstance(session, RecurrentHeadSession)
    prompt, model = [1, 2, 3, 4, 5, 0, 2], engine.model
    cache = model.new_cache()
    pipeline = LogitsPipeline(SamplingParams(), VOCABULARY, prompt=prompt)
    session.begin(DraftContext(prompt, pipeline, SeededStream(1), model, cache))
    states = model.forward([Segment(cache, prompt)], session.head.config.features)[0].hidden
    before = {name: state[4:-1] for name, state in states.items()}
    session.observe(Observation([3], {name: state[-1:] for name, state in states.items()}, prompt_hidden=before))
    assert session.first == 4
    check(session)
    assert session.propose(DraftBudget(8, 4)).tree.drafted == 6
    assert session.cache.length == 3
    check(session)
    assert session.reusable([*prompt, 3, 1]) == 0


# -- decoders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "hf_gpt2"])
def test_decoders_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """heads.md section 4, item 11: states of batched passes and tree rows are those of a pass over the text alone."""
    watch = Watch(monkeypatch, tolerance=2e-3)
    target = IMPLEMENTATIONS[family].build(tmp_path)
    tokenizer = letters_tokenizer(50)
    requests = [(i, p, SamplingParams(max_tokens=9, ignore_eos=True)) for i, p in enumerate(random_prompts(3, 50, 9))]
    for method in ("eagle", "eagle3"):
        engine = build_engine(f"{method}:random", "widths:3,2", target=target, tokenizer=tokenizer)  # type: ignore[arg-type]
        plain = {i: engine.plain().generate(prompt, params).tokens for i, prompt, params in requests}
        assert {i: result.tokens for i, result in engine.run(requests, batch=3)} == plain
        assert engine._lanes[Regime.GREEDY].drafter.head.network.config.hidden_size == 24
    assert watch.calls["propose"] > 20
