"""The oracle and the empty drafter, driven by a plain loop over the toy model."""

from __future__ import annotations

import pytest

from outrider.drafters.base import DraftBudget, DraftContext, Drafter, DraftOptions, DraftParts, Observation
from outrider.drafters.none import NoDrafter
from outrider.drafters.replay import Replay, ReplayOptions
from outrider.models.base import Segment, tree_segment
from outrider.models.toy import ToyCache, ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import Shape
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions

PROMPT = [3, 1, 4, 1, 5]
MODEL = ToyModel(32)
GREEDY = SamplingParams()
PENALTIES = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)


def prefilled() -> ToyCache:
    cache = MODEL.new_cache()
    MODEL.forward([Segment(cache, PROMPT)])
    cache.commit(range(len(PROMPT)))
    return cache


def greedy(pipeline: LogitsPipeline, output: list[int]) -> int:
    return pipeline.greedy_token(MODEL.logits_after([*PROMPT, *output]), output)


def run(drafter: Drafter, steps: int, params: SamplingParams = GREEDY) -> tuple[list[int], int, int]:
    """Greedy decoding with ``drafter``: (output, guesses accepted, guesses tried); checks every proposal's rollback."""
    pipeline = LogitsPipeline(params, MODEL.vocab_size, prompt=PROMPT)
    cache, session = prefilled(), drafter.new_session()
    session.begin(DraftContext(PROMPT, pipeline, SeededStream(5), MODEL, cache))
    output = [greedy(pipeline, [])]
    session.observe(Observation(output[:]))
    accepted = tried = 0
    for _ in range(steps):
        tree = session.propose(DraftBudget(32, 8)).tree
        assert tree.tokens[0] == output[-1]
        assert (cache.length, cache.scratch) == (len(PROMPT) + len(output) - 1, 0)
        (out,) = MODEL.forward([tree_segment(cache, tree)])
        node, path, kept = 0, [0], []
        while True:
            token = pipeline.greedy_token(out.logits[node], [*output, *kept])
            kept.append(token)
            tried += 1 if tree.children(node) else 0
            if token not in tree.children(node):
                break
            accepted += 1
            node = tree.children(node)[token]
            path.append(node)
        cache.commit(path)
        output += kept
        session.observe(Observation(kept))
    session.end()
    return output, accepted, tried


def replay(rate: float, shape: Shape | None = None) -> Replay:
    return Replay(ReplayOptions(rate=rate), shape or Chain(ChainOptions(length=4)), DraftParts(MODEL))


@pytest.mark.parametrize("params", [GREEDY, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "shape", [Chain(ChainOptions(length=4)), Widths(WidthsOptions(widths=(2, 1, 2)))], ids=["c", "w"]
)
def test_output_is_the_targets_own(shape: Shape, rate: float, params: SamplingParams) -> None:
    output, _, _ = run(replay(rate, shape), 8, params)
    pipeline = LogitsPipeline(params, MODEL.vocab_size, prompt=PROMPT)
    assert output == [greedy(pipeline, output[:n]) for n in range(len(output))]


def test_rate_1_is_always_accepted_and_rate_0_never() -> None:
    assert run(replay(1.0), 10)[1:] == (40, 40)
    assert run(replay(0.0), 10)[1:] == (0, 10)
    assert run(replay(0.0, Widths(WidthsOptions(widths=(4, 2)))), 10)[1] == 0


@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("shape", [Chain(ChainOptions(length=4)), Widths(WidthsOptions(widths=(2, 2)))], ids=["c", "w"])
def test_the_acceptance_rate_is_the_one_chosen(shape: Shape, rate: float) -> None:
    _, accepted, tried = run(replay(rate, shape), 250)
    assert tried >= 250
    assert abs(accepted / tried - rate) < 4 * (rate * (1 - rate) / tried) ** 0.5


def test_same_seed_same_guesses() -> None:
    assert run(replay(0.5), 20) == run(replay(0.5), 20)


def test_the_target_cache_is_rolled_back_when_drafting_fails() -> None:
    class Broken(Chain):
        def grow(self, root_token, source, limits):  # type: ignore[no-untyped-def]
            super().grow(root_token, source, limits)
            raise RuntimeError("lost")

    cache, session = prefilled(), replay(1.0, Broken(ChainOptions(length=2))).new_session()
    pipeline = LogitsPipeline(SamplingParams(), MODEL.vocab_size)
    session.begin(DraftContext(PROMPT, pipeline, SeededStream(0), MODEL, cache))
    session.observe(Observation([7]))
    with pytest.raises(RuntimeError, match="lost"):
        session.propose(DraftBudget(8, 8))
    assert (cache.length, cache.scratch) == (len(PROMPT), 0)


def test_no_drafter_is_plain_decoding() -> None:
    output, accepted, tried = run(NoDrafter(DraftOptions(), Chain(ChainOptions()), DraftParts(MODEL)), 12)
    assert (len(output), accepted, tried) == (13, 0, 0)
