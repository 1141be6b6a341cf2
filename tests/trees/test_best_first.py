"""Best-first trees against brute force: the kept set, its closure, the early stop, limits and the draft cache."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from engine.tiny_engines import build_engine
from outrider.drafters.model_source import ModelSource
from outrider.drafters.ranking import best_children
from outrider.errors import IllegalCombinationError
from outrider.models.base import Segment
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import (
    BatchSource,
    Candidates,
    FloatArray,
    GrowLimits,
    RankedChildren,
    rank_candidates,
)
from outrider.trees.shapes.best_first import PRESETS, BestFirst, BestFirstOptions
from outrider.trees.token_tree import TokenTree
from outrider.trees.topology import ancestors_mask
from outrider.types import ProposalKind, Topology

VOCABULARY, DEPTH = 6, 4
Path = tuple[int, ...]


class ToySource:
    """Distributions of a toy model by path; records the batches asked for."""

    name = "toy"

    def __init__(self, seed: int = 0, sharpness: float = 1.5, vocabulary: int = VOCABULARY) -> None:
        self.model = ToyModel(vocabulary, seed=seed, sharpness=sharpness)
        self.batches: list[int] = []

    def q(self, path: Sequence[int]) -> Tensor:
        return torch.softmax(self.model.logits_after([0, *path]), -1)

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        self.batches.append(len(nodes))
        return [Candidates(probabilities=self.q(tree.path_tokens(node))) for node in nodes]


class ListSource(ToySource):
    """Ranked lists without a distribution, as an n-gram table gives; nothing below token 0."""

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [
            Candidates() if tree.tokens[node] == 0 and node else Candidates(*known.top(3))
            for node, known in zip(nodes, super().candidates(tree, nodes), strict=True)
        ]


def limits(max_nodes: int = 4096, max_depth: int = DEPTH) -> GrowLimits:
    return GrowLimits(max_nodes, max_depth, 3, SeededStream(0))


def shape(budget: int, **options: object) -> BestFirst:
    return BestFirst(BestFirstOptions.model_validate({"budget": budget, **options}))


def paths(tree: TokenTree) -> list[Path]:
    return [tuple(tree.path_tokens(node)) for node in range(1, len(tree))]


def all_scores(source: ToySource, decay: float = 1.0) -> dict[Path, float]:
    """log score of each of the 6 + 36 + 216 + 1296 prefixes."""
    scores: dict[Path, float] = {(): 0.0}
    for depth in range(DEPTH):
        for path in product(range(VOCABULARY), repeat=depth):
            q = source.q(path)
            scores |= {(*path, t): scores[path] + math.log(float(q[t])) + math.log(decay) for t in range(VOCABULARY)}
    del scores[()]
    return scores


def best_of(scores: dict[Path, float], budget: int) -> set[Path]:
    return set(sorted(scores, key=lambda path: -scores[path])[:budget])


def is_closed(kept: Sequence[Path]) -> bool:
    known = {(), *kept}
    return len(known) == len(kept) + 1 and all(path[:-1] in known for path in kept)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 300), st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([1.0, 0.95, 0.5]))
def test_the_kept_set_is_the_best_prefixes(seed: int, budget: int, sharpness: float, decay: float) -> None:
    """Brute force over every prefix of a vocabulary of 6 to depth 4; any beam: the search ends when it is sure."""
    source = ToySource(seed, sharpness)
    expected = best_of(all_scores(source, decay), budget)
    for beam in (4096, 7, 1):
        grown = paths(shape(budget, preset="custom", decay=decay, beam=beam, depth=4096).grow(0, source, limits()))
        assert set(grown) == expected
        assert is_closed(grown)


def expand_and_rerank(source: ToySource, beam: int, branch: int, depth: int, budget: int) -> set[Path]:
    """EAGLE-2 in a few plain lines, without an early stop."""
    pool: dict[Path, float] = {}
    level: dict[Path, float] = {(): 0.0}
    for _ in range(depth):
        new: dict[Path, float] = {}
        for path, score in level.items():
            values, tokens = torch.topk(source.q(path), branch)
            new |= {(*path, t): score + math.log(v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)}
        pool |= new
        level = dict(sorted(new.items(), key=lambda item: -item[1])[:beam])
    return best_of(pool, budget)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 80), st.integers(1, 8), st.integers(1, VOCABULARY), st.integers(1, DEPTH))
def test_eagle2_expands_levels_and_reranks(seed: int, budget: int, beam: int, branch: int, depth: int) -> None:
    source = ToySource(seed)
    tree = shape(budget, preset="eagle2", beam=beam, branch=branch, depth=depth).grow(0, source, limits())
    assert set(paths(tree)) == expand_and_rerank(source, beam, branch, depth, budget)
    assert is_closed(paths(tree))


def search_without_early_stop(source: ToySource, beam: int, branch: int, passes: int, budget: int) -> set[Path]:
    """SpecExec's search, always ``passes`` passes: nodes outside the best are evaluated too."""
    pool: dict[Path, float] = {(): 0.0}
    done: set[Path] = set()
    for _ in range(passes):
        ranking = sorted((p for p in pool if len(p) < DEPTH), key=lambda p: -pool[p])
        for path in [p for p in ranking if p not in done][:beam]:
            done.add(path)
            values, tokens = torch.topk(source.q(path), branch)
            pool |= {
                (*path, t): pool[path] + math.log(v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)
            }
    del pool[()]
    return best_of(pool, budget)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 9), st.integers(1, VOCABULARY), st.integers(1, 12))
def test_the_early_stop_never_changes_the_kept_set(seed: int, budget: int, beam: int, branch: int, passes: int) -> None:
    source = ToySource(seed)
    options = {"preset": "custom", "beam": beam, "branch": branch, "depth": passes}
    tree = shape(budget, **options).grow(0, source, limits())
    # The depth option bounds passes; levels are bounded by it too, which passes alone imply.
    assert set(paths(tree)) == search_without_early_stop(ToySource(seed), beam, branch, passes, budget)
    assert len(source.batches) <= passes
    assert max(source.batches) <= beam


def test_it_does_stop_early_and_asks_in_batches() -> None:
    source = ToySource(sharpness=6.0)
    tree = shape(5).grow(0, source, limits(max_depth=64))
    assert tree.drafted == 5
    assert len(source.batches) <= 6
    wide = ToySource(sharpness=0.1)
    shape(200, preset="specexec").grow(0, wide, limits(max_depth=64))
    assert max(wide.batches) > 30


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "drafted"), [(0, 4, 0), (4, 0, 0), (1, 4, 1), (7, 2, 7), (500, 1, 6), (500, 2, 42)]
)
def test_limits(preset: str, max_nodes: int, max_depth: int, drafted: int) -> None:
    source = ToySource()
    tree = shape(400, preset=preset).grow(0, source, limits(max_nodes, max_depth))
    assert tree.drafted == drafted
    assert max(tree.depths) <= max_depth
    assert bool(source.batches) == (drafted > 0)
    assert tree.sources[1:] == ["toy"] * drafted


def test_the_least_path_probability() -> None:
    source = ToySource(4)
    for least in (0.3, 0.05, 0.01):
        expected = {path for path, score in all_scores(source).items() if score >= math.log(least)}
        grown = shape(4000, preset="custom", min_path_probability=least).grow(0, source, limits())
        assert set(paths(grown)) == expected
    assert shape(10, min_path_probability=1.0).grow(0, source, limits()).drafted == 0


def test_unlikely_paths_are_guessed_but_not_followed() -> None:
    """Every node above the threshold is expanded; of those below it only the nodes themselves are guessed."""
    for least in (0.3, 0.1):
        source = ToySource(4)
        scores = all_scores(source)
        expected = {
            path
            for path in scores
            if len(path) == 1 or all(scores[path[:n]] >= math.log(least) for n in range(1, len(path)))
        }
        grown = shape(4000, preset="custom", min_expand_probability=least).grow(0, source, limits())
        assert set(paths(grown)) == expected
    nothing_followed = shape(10, preset="custom", min_expand_probability=1.0).grow(0, ToySource(4), limits())
    assert set(nothing_followed.depths) == {0, 1}


def test_no_draft_pass_is_made_for_what_comes_too_late() -> None:
    """A full budget's least probable node cannot have a child among the best, so it is not evaluated."""

    class Sure:
        name = "sure"
        passes = 0

        def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
            self.passes += 1
            return [Candidates([1], [0.9]) for _ in nodes]

    source = Sure()
    assert shape(3, preset="custom").grow(0, source, limits(max_depth=9)).drafted == 3
    assert source.passes == 3


def test_scores_are_path_probabilities() -> None:
    source = ToySource(4)
    tree = shape(40, preset="custom").grow(0, source, limits())
    known = all_scores(source)
    assert tree.scores[0] == 1.0
    for node in range(1, len(tree)):
        assert tree.scores[node] == pytest.approx(math.exp(known[tuple(tree.path_tokens(node))]))


def test_lists_without_a_distribution() -> None:
    tree = shape(50).grow(0, ListSource(2), limits())
    assert is_closed(paths(tree))
    assert not any(0 in path[:-1] for path in paths(tree)), "nothing was known below token 0"
    assert any(0 in path for path in paths(tree))


def test_a_candidate_of_score_0_is_no_guess() -> None:
    class Doubtful:
        name = "doubtful"

        def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
            return [Candidates([4, 2], [0.5, 0.0]) for _ in nodes]

    assert paths(shape(9).grow(0, Doubtful(), limits(max_depth=2))) == [(4,), (4, 4)]


def test_certain_tokens_tie_with_their_parents() -> None:
    """q = 1 all along a path: equal scores, and the node found first (the parent) stays."""

    class Sure:
        name = "sure"

        def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
            return [Candidates(probabilities=torch.tensor([0.0, 1.0 + 1e-7, 0.0])) for _ in nodes]

    tree = shape(3, preset="custom").grow(0, Sure(), limits(max_depth=9))
    assert paths(tree) == [(1,), (1, 1), (1, 1, 1)]


NO_THRESHOLDS = {"min_path_probability": 0.0, "min_expand_probability": 0.0}


def test_presets_fill_in_what_is_not_given() -> None:
    assert BestFirstOptions() == BestFirstOptions(preset="specexec")
    for name, values in PRESETS.items():
        filled = BestFirstOptions.model_validate({"preset": name, "budget": "99"})
        assert filled.model_dump() == {**values, "budget": 99, "preset": name, **NO_THRESHOLDS}
    changed = BestFirstOptions.model_validate({"preset": "eagle2", "beam": "4"})
    assert (changed.beam, changed.branch, changed.expand) == (4, 10, "level")


@pytest.mark.parametrize(
    "value",
    [
        {"budget": 0},
        {"budget": 4097},
        {"preset": "none"},
        {"decay": 0.0},
        {"beam": 0},
        {"min_path_probability": 2},
        {"min_expand_probability": -1},
    ],
)
def test_wrong_options_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BestFirstOptions.model_validate(value)


def test_drawn_proposals_are_refused() -> None:
    assert BestFirst.topology is Topology.TREE
    with pytest.raises(IllegalCombinationError, match="cannot make iid"):
        BestFirst(BestFirstOptions(), ProposalKind.IID)
    assert shape(77).size == 77


# -- with a model behind it --------------------------------------------------------------------------------------------


class Following(ToySource, BatchSource):
    """A ``BatchSource`` that remembers by path which nodes it evaluated."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.evaluated: dict[int, Path] = {}

    def ranked(self, tree: TokenTree, nodes: Sequence[int], k: int, least: FloatArray | None = None) -> RankedChildren:
        self.evaluated |= {node: tuple(tree.path_tokens(node)) for node in nodes}
        return rank_candidates(self.candidates(tree, nodes), k)

    def renumber(self, new_index: Mapping[int, int]) -> None:
        self.evaluated = {new_index[node]: path for node, path in self.evaluated.items() if node in new_index}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from(["specexec", "eagle2"]))
def test_a_source_learns_where_its_nodes_went(seed: int, budget: int, preset: str) -> None:
    source = Following(seed)
    tree = shape(budget, preset=preset).grow(0, source, limits())
    assert source.evaluated[0] == ()
    assert all(tuple(tree.path_tokens(node)) == path for node, path in source.evaluated.items())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("drafter", ["small_model", "layer_skip:3", "ngram"])
def test_text_is_the_targets_and_draft_caches_stay_right(drafter: str, preset: str) -> None:
    """The toy caches refuse an entry that was computed under another prefix."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = build_engine(drafter, f"best_first:20,preset={preset}")
    result, plain = engine.generate([1, 2, 3, 1, 2], params), build_engine().generate([1, 2, 3, 1, 2], params)
    assert result.tokens == plain.tokens
    assert result.stats.num_accepted_tokens > 5


def toy_source(model: ToyModel, params: SamplingParams) -> ModelSource:
    cache = model.new_cache()
    model.forward([Segment(cache, [1, 2, 3])])
    cache.commit(range(3))
    return ModelSource("draft", model, cache, LogitsPipeline(params, model.vocab_size), [5])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_batched_ranking_gives_the_tree_of_the_row_by_row_one(temperature: float) -> None:
    """With ``least`` and without, through ``ranked`` and through ``candidates``."""

    class RowByRow:
        name = "draft"

        def __init__(self, source: ModelSource) -> None:
            self.candidates = source.candidates

    params = SamplingParams(temperature=temperature)
    model = ToyModel(300, sharpness=1.5)
    one, other = toy_source(model, params), RowByRow(toy_source(model, params))
    for preset in PRESETS:
        grown = [shape(60, preset=preset).grow(5, source, limits()) for source in (one, other)]
        assert set(paths(grown[0])) == set(paths(grown[1]))
        one, other = toy_source(model, params), RowByRow(toy_source(model, params))


@pytest.mark.parametrize("size", [5, 32, 63, 1000, 4096])
@pytest.mark.parametrize("k", [1, 4, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_best_children_are_the_pipelines(size: int, k: int, dtype: torch.dtype) -> None:
    """Every setting against ``LogitsPipeline.ranking``: the same tokens, and probabilities in proportion."""
    logits = (3 * torch.randn(37, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    settings_of = [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=0.4, min_p=0.2),
        SamplingParams(temperature=1e-30),
    ]
    for params in settings_of:
        found = best_children(logits, params, k)
        pipeline = LogitsPipeline(params, size)
        for row in range(len(logits)):
            expected = pipeline.ranking(logits[row], ())
            mine = found.owners == row
            values = torch.topk(expected, min(k, size)).values
            values = values[values > 1e-30].numpy()
            assert len(values) == mine.sum()
            np.testing.assert_allclose(expected[found.tokens[mine]].numpy(), values, rtol=1e-4)
            np.testing.assert_allclose(found.scores[mine] / found.scores[mine][0], values / values[0], rtol=1e-3)


def test_least_leaves_out_only_what_scores_less() -> None:
    logits = 3 * torch.randn(50, 2000, generator=torch.Generator().manual_seed(1))
    least = np.linspace(0.0, 0.6, 50)
    everything = best_children(logits, SamplingParams(), 20)
    some = best_children(logits, SamplingParams(), 20, least)
    wanted = everything.scores >= least[everything.owners]
    assert 0 < wanted.sum() < len(wanted)
    assert np.array_equal(some.owners, everything.owners[wanted])
    assert np.array_equal(some.tokens, everything.tokens[wanted])
    np.testing.assert_allclose(some.scores, everything.scores[wanted])
    assert len(best_children(logits, SamplingParams(), 20, np.full(50, 1.1)).owners) == 0


def random_tree(size: int) -> np.ndarray:
    choose = np.random.default_rng(0)
    return np.array([-1, *(choose.integers(max(0, node - 60), node) for node in range(1, size))], dtype=np.int64)


@pytest.mark.parametrize("size", [1024, 4096])
def test_masks_of_large_trees_are_quick(size: int) -> None:
    """Measured 0.5 and 13 ms for random trees, 13 and 64 ms for chains; allowed far more, for a loaded machine."""
    for parents in (random_tree(size), np.arange(-1, size - 1)):
        ancestors_mask(parents)
        started = time.perf_counter()
        mask = ancestors_mask(parents)
        assert time.perf_counter() - started < 1.0
        assert mask[size - 1, 0]


class ReadySource(BatchSource):
    """The same ranked children everywhere, in a batch, at no cost."""

    name = "ready"

    def __init__(self) -> None:
        rows = torch.softmax(2 * torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)), -1)
        values, tokens = torch.topk(rows, 32)
        self.values, self.tokens = values.double().numpy(), tokens.numpy()

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        raise AssertionError("a batch source is asked for a batch")

    def ranked(self, tree: TokenTree, nodes: Sequence[int], k: int, least: FloatArray | None = None) -> RankedChildren:
        kept = [31 * node % 64 for node in nodes]
        owners = np.repeat(np.arange(len(nodes)), 32)
        return RankedChildren(owners, self.tokens[kept].ravel(), self.values[kept].ravel())

    def renumber(self, new_index: Mapping[int, int]) -> None:
        assert new_index[0] == 0


def test_a_thousand_nodes_are_chosen_quickly() -> None:
    """The pool's own work beside ranking: measured 15 ms for 1,024 nodes; allowed far more, for a loaded machine."""
    source = ReadySource()
    started = time.perf_counter()
    tree = shape(1024).grow(0, source, limits(max_depth=64))
    assert time.perf_counter() - started < 0.5
    assert tree.drafted == 1024
