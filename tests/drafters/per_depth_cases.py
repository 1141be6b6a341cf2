"""Sessions of drafters with a head for each depth, driven by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.base import DraftContext, Observation
from outrider.drafters.per_depth import PerDepthDrafter, PerDepthSession
from outrider.engine.engine import Engine
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline

SHAPES = [
    "chain:6",
    "widths:2,2,1,2,1",
    "static",
    "sequoia:12",
    "best_first:12",
    "best_first:16,preset=eagle2",
    "pacer:9",
]
IDS = [1, 2, 3, 5, 8, 9, 11]


def session_at(engine: Engine, feature: Tensor | None, params: SamplingParams, root: int = 4) -> PerDepthSession:
    """A session that has observed one token after a prompt."""
    drafter = engine._lanes[params.regime].drafter
    assert isinstance(drafter, PerDepthDrafter)
    session = drafter.new_session()
    prompt = [3, 5, 4]
    pipeline = LogitsPipeline(params, engine.model.vocab_size, prompt=prompt)
    session.begin(DraftContext(prompt, pipeline, SeededStream(1), engine.model, engine.model.new_cache()))
    session.observe(Observation([root], {} if feature is None else {"final": feature}))
    return session


def feature_row(size: int = 8, seed: int = 2) -> Tensor:
    return torch.randn((1, size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
