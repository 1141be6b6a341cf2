"""The pacer: always the most confident branch next, one draft call a node, and a mask is all that a switch changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from engine.tiny_engines import build_engine
from outrider.drafters.model_source import ModelSource
from outrider.models.base import LanguageModel, Segment
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import Candidates, GrowLimits
from outrider.trees.shapes.pacer import Pacer, PacerOptions
from outrider.trees.token_tree import TokenTree

VOCABULARY = 6


class ToySource:
    """Distributions of a toy model by path; records the nodes asked about."""

    name = "toy"

    def __init__(self, seed: int = 0, sharpness: float = 1.5) -> None:
        self.model = ToyModel(VOCABULARY, seed=seed, sharpness=sharpness)
        self.asked: list[int] = []

    def q(self, path: Sequence[int]) -> Tensor:
        return torch.softmax(self.model.logits_after([0, *path]), -1)

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        assert len(nodes) == 1
        self.asked += nodes
        return [Candidates(probabilities=self.q(tree.path_tokens(node))) for node in nodes]


def limits(max_nodes: int = 64, max_depth: int = 64) -> GrowLimits:
    return GrowLimits(max_nodes, max_depth, 3, SeededStream(0))


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    return [tuple(tree.path_tokens(node)) for node in range(1, len(tree))]


def confidence(source: ToySource, path: Sequence[int]) -> float:
    product = 1.0
    for depth, token in enumerate(path):
        product *= float(source.q(path[:depth])[token])
    return product


def tips(
    source: ToySource, known: list[tuple[int, ...]], branches: int, max_depth: int
) -> dict[tuple[int, ...], float]:
    """C of every branch that could be decoded next, by brute force."""
    found = {}
    for path in [(), *known]:
        if len(path) < max_depth:
            for token in torch.topk(source.q(path), branches).indices.tolist():
                if (*path, token) not in known:
                    found[(*path, token)] = confidence(source, (*path, token))
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, VOCABULARY), st.integers(1, 25), st.integers(1, 5))
def test_every_node_extends_the_most_confident_branch(seed: int, branches: int, nodes: int, max_depth: int) -> None:
    source = ToySource(seed)
    shape = Pacer(PacerOptions(nodes=nodes, branches=branches, fallback=0.0))
    grown = paths(shape.grow(0, source, limits(max_depth=max_depth)))
    for step, path in enumerate(grown):
        best = max(tips(source, grown[:step], branches, max_depth).values())
        assert confidence(source, path) == pytest.approx(best, rel=1e-9)
    assert len(grown) == nodes or not tips(source, grown, branches, max_depth)


def test_one_draft_call_for_each_node() -> None:
    source = ToySource()
    tree = Pacer(PacerOptions(nodes=12, fallback=0.0)).grow(0, source, limits())
    assert source.asked == list(range(12)), "each node once, as soon as it was added; the last needs none"
    assert tree.drafted == 12
    assert tree.sources[1:] == ["toy"] * 12
    assert any(parent != node - 1 for node, parent in enumerate(tree.parents)), "it switched branches"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(0.001, 0.9))
def test_it_stops_when_the_best_branch_is_below_the_threshold(seed: int, alpha: float) -> None:
    source = ToySource(seed)
    grown = paths(Pacer(PacerOptions(nodes=30, fallback=alpha)).grow(0, source, limits()))
    assert all(confidence(source, path) >= alpha for path in grown[1:])
    assert len(grown) == 30 or max(tips(source, grown, 3, 64).values()) < alpha or len(grown) == 1


@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "drafted"), [(0, 5, 0), (5, 0, 0), (3, 5, 3), (64, 1, 3), (1, 1, 1)]
)
def test_limits_are_kept_and_nothing_is_asked_beyond(max_nodes: int, max_depth: int, drafted: int) -> None:
    source = ToySource()
    tree = Pacer(PacerOptions(fallback=0.0)).grow(0, source, limits(max_nodes, max_depth))
    assert tree.drafted == drafted
    assert max(tree.depths) <= max_depth
    assert len(source.asked) == (0 if drafted == 0 else 1 if max_depth == 1 else drafted)


def test_nothing_known() -> None:
    class Silent:
        name = "silent"

        def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
            return [Candidates() for _ in nodes]

    assert Pacer(PacerOptions()).grow(0, Silent(), limits()).drafted == 0


def test_all_accepted_means_the_depth_of_the_tree() -> None:
    """Runner-ups are alternatives, not errors: a perfect drafter halves alpha although most nodes were not taken."""
    shape = Pacer(PacerOptions(nodes=10)).for_request()
    tree = shape.grow(0, ToySource(3), limits())
    depth = max(tree.depths)
    assert 1 < depth < tree.drafted
    shape.observe(tree.drafted, depth)
    assert shape.alpha == pytest.approx(0.005)
    shape.observe(tree.drafted, 0)
    assert shape.alpha == pytest.approx(0.01)
    shape.observe(tree.drafted, depth - 1)
    assert shape.alpha == pytest.approx(0.01 / 0.5 ** (1 / depth))


def test_state_belongs_to_one_request_and_may_be_off() -> None:
    configured = Pacer(PacerOptions())
    first, second = configured.for_request(), configured.for_request()
    first.grow(0, ToySource(), limits())
    first.observe(10, 0)
    assert first.alpha == pytest.approx(0.02)
    assert second.alpha == configured.alpha == configured.for_request().alpha == 0.01
    still = Pacer(PacerOptions(adaptive=False)).for_request()
    still.grow(0, ToySource(), limits())
    still.observe(10, 0)
    assert still.alpha == 0.01
    never = Pacer(PacerOptions(fallback=0.0)).for_request()
    never.grow(0, ToySource(), limits())
    never.observe(10, 0)
    assert never.alpha == 0.0


def test_rows_of_a_batch_do_not_share_a_threshold() -> None:
    """The same requests alone and in a batch: their drafts, and so their step records, are the same."""
    engine = build_engine("small_model", "pacer:6,fallback=0.2")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [(index, [1 + index, 3, 2], params) for index in range(4)]
    alone = {key: engine.generate(prompt, asked) for key, prompt, asked in requests}
    for key, result in engine.run(requests, batch=4):
        assert result.tokens == alone[key].tokens
        assert [r.parents for r in result.records] == [r.parents for r in alone[key].records]
    drafted = {record.drafted for result in alone.values() for record in result.records if record.phase == "decode"}
    assert len(drafted) > 1, "the threshold moved"


def separate_logits(model: LanguageModel, text: list[int]) -> Tensor:
    return model.forward([Segment(model.new_cache(), text, logit_rows=[len(text) - 1])])[0].logits[0]


@pytest.mark.parametrize("window", [None, 4])
def test_a_mask_switch_gives_the_logits_of_the_branch_decoded_alone(window: int | None) -> None:
    model = ToyModel(VOCABULARY, window=window, seed=5)
    prompt, root = [1, 2, 3, 4, 1], 2
    cache = model.new_cache()
    model.forward([Segment(cache, prompt)])
    cache.commit(range(len(prompt)))
    source = ModelSource("draft", model, cache, LogitsPipeline(SamplingParams(), VOCABULARY), [root])
    seen: dict[int, Tensor] = {}
    original = source.evaluate

    def evaluate(tree: TokenTree, nodes: Sequence[int]) -> Tensor:
        rows = original(tree, nodes)
        seen.update(zip(nodes, rows, strict=True))
        return rows

    source.evaluate = evaluate  # type: ignore[method-assign]
    tree = Pacer(PacerOptions(nodes=100, fallback=0.0)).grow(root, source, limits(100))
    switches = sum(tree.parents[node + 1] != node for node in range(1, 99))
    assert switches > 20
    assert len(seen) == 100
    for node, logits in seen.items():
        alone = separate_logits(model, [*prompt, root, *tree.path_tokens(node)])
        assert torch.equal(logits, alone)


@pytest.mark.parametrize("value", [{"nodes": 0}, {"nodes": 4097}, {"branches": 0}, {"fallback": 1.0}, {"node": 3}])
def test_wrong_options_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PacerOptions.model_validate(value)


def test_size_is_the_node_budget() -> None:
    assert Pacer(PacerOptions(nodes=40)).size == 40
