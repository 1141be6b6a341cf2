"""Issue 3: a tree of 1,024 nodes is built in under 3% of the time its draft forwards take, on the default model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

import outrider
from outrider.drafters.model_source import ModelSource
from outrider.models.base import FULL, LanguageModel, Segment, SegmentOutput, SequenceCache, Sublayers
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import GrowLimits
from outrider.trees.shapes.best_first import BestFirst, BestFirstOptions

TEXT = "The history of the river trade in the north is a story of towns, boats and people. In the early years the"


class Timed:
    """The part of a model that a source uses, with the seconds that its forwards took."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.seconds = 0.0

    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        started = time.perf_counter()
        outputs = self.model.forward(segments, hidden, skip)
        self.seconds += time.perf_counter() - started
        return outputs


def share(model: LanguageModel, cache: SequenceCache, output: list[int], params: SamplingParams) -> float:
    """Everything beside the forwards (normalising and ranking logits, choosing nodes, masks, the tree) over them."""
    timed = Timed(model)
    pipeline = LogitsPipeline(params, model.vocab_size)
    shape = BestFirst(BestFirstOptions(budget=1024))
    with cache.speculation():
        source = ModelSource("draft", timed, cache, pipeline, output)  # type: ignore[arg-type]
        started = time.perf_counter()
        tree = shape.grow(output[-1], source, GrowLimits(4096, 64, 0, SeededStream(0)))
        seconds = time.perf_counter() - started
    assert tree.drafted == 1024
    return (seconds - timed.seconds) / timed.seconds


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_of_1024_nodes_costs_under_3_percent_of_its_forwards(temperature: float) -> None:
    """Measured with one thread, two cores at a load of 7: 2.4% at temperature 0, 2.9 to 3.5% with top-p in one run."""
    torch.set_num_threads(1)
    engine = outrider.load("smollm2-135m", drafter="none", dtype="bfloat16")
    torch.set_num_threads(1)
    tokens, model = engine.encode(TEXT), engine.model
    cache = model.new_cache()
    model.forward([Segment(cache, tokens[:-1], logit_rows=())])
    cache.commit(range(len(tokens) - 1))
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0)
    assert min(share(model, cache, tokens[-1:], params) for _ in range(4)) < 0.03
