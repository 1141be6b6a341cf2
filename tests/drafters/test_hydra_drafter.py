"""Hydra as a drafter: depth d's head reads the guesses above the node, once a level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.per_depth_cases import IDS, SHAPES, feature_row, session_at
from engine.tiny_engines import build_engine, engine_law, random_prompts
from heads.tiny_heads import head_file
from outrider.drafters.base import DraftBudget, Observation
from outrider.drafters.hydra import HydraDrafter, HydraSource
from outrider.errors import ModelFileError
from outrider.heads.file import load_head
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime
from training.objectives_of import head_rows


@pytest.fixture
def target() -> ToyModel:
    return ToyModel(vocab_size=12, order=2, seed=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_text_is_the_targets(shape: str, target: ToyModel, tmp_path: Path) -> None:
    plain = build_engine(target=target)
    engine = build_engine(f"hydra:{head_file(tmp_path / 'h', 'hydra', target, IDS)}", shape, target=target)
    accepted = 0
    for prompt in random_prompts(8, 12):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        result = engine.generate(prompt, params)
        assert result.tokens == plain.generate(prompt, params).tokens
        accepted += result.stats.num_accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize(
    ("shape", "proposal", "verifier"),
    [
        ("chain:3", ProposalKind.IID, "block"),
        ("widths:2,2", ProposalKind.WITHOUT_REPLACEMENT, "multi_step"),
        ("sequoia:3", ProposalKind.IID, "multi_step"),
        ("best_first:4", ProposalKind.DETERMINISTIC, "sample_match"),
    ],
)
@pytest.mark.parametrize("ids", [None, [0, 2]])
def test_law(
    shape: str,
    proposal: ProposalKind,
    verifier: str,
    ids: list[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = ToyModel(vocab_size=3, seed=4, sharpness=1.0)
    params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, max_tokens=3, ignore_eos=True)
    drafter = f"hydra:{head_file(tmp_path / 'h', 'hydra', tiny, ids)}"
    engine = build_engine(drafter, shape, proposal, verifier, target=tiny)
    law, accepted = engine_law(monkeypatch, engine, [1, 2], params)
    expected, _ = engine_law(monkeypatch, build_engine(target=tiny), [1, 2], params)
    assert accepted > 0
    assert max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in {*law, *expected}) < 1e-9


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("shape", ["widths:2,2,2,1", "best_first:20"])
def test_candidates_are_the_training_forms(shape: str, ids: list[int] | None, target: ToyModel, tmp_path: Path) -> None:
    """A node's children come from the head of its depth, given the root and the guesses down to the node."""
    file = head_file(tmp_path / "h", "hydra", target, ids)
    engine = build_engine(f"hydra:{file}", shape, ProposalKind.DETERMINISTIC, target=target)
    feature, pipeline = feature_row(), LogitsPipeline(SamplingParams(), 12)
    tree = session_at(engine, feature, SamplingParams()).propose(DraftBudget(64, 8)).tree
    assert max(tree.depths) >= 3
    orders = set()
    for node in range(len(tree)):
        children = [tree.tokens[child] for child, parent in enumerate(tree.parents) if parent == node]
        if children:
            rows = head_rows(load_head(file), target, feature, [tree.tokens[0], *tree.path_tokens(node)])
            order = pipeline.ranking(rows[tree.depths[node]], []).argsort(descending=True)[: len(children)].tolist()
            assert children == order
            orders.add((tree.depths[node], *order))
    assert len(orders) > len({depth for depth, *_ in orders})  # the path matters, not the depth alone


def test_nodes_of_several_depths_keep_their_order(target: ToyModel, tmp_path: Path) -> None:
    file = head_file(tmp_path / "h", "hydra", target)
    drafter = build_engine(f"hydra:{file}", target=target)._lanes[Regime.GREEDY].drafter
    assert isinstance(drafter, HydraDrafter)
    feature = feature_row()
    pipeline = LogitsPipeline(SamplingParams(), 12)
    source = HydraSource("hydra", drafter.network, feature.float(), target.embed, pipeline, [4])
    tree = TokenTree(4)
    first, second = tree.extend([0, 0], [2, 3])
    deep = tree.extend([first, second, second], [8, 9, 1])
    nodes = [deep[0], first, deep[2], second, 0, deep[1]]
    found = source.rows(tree, nodes)
    for row, node in zip(found, nodes, strict=True):
        expected = head_rows(load_head(file), target, feature, [4, *tree.path_tokens(node)])[tree.depths[node]]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)


def test_one_evaluation_a_level(target: ToyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine("hydra:random", "widths:3,2,1", target=target)
    session = session_at(engine, feature_row(), SamplingParams())
    network = session.drafter.network
    plain, calls = network.state, []

    def counting(head: int, **inputs: object) -> torch.Tensor:
        calls.append((head, len(inputs["feature"])))  # type: ignore[arg-type]
        return plain(head, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(network, "state", counting)
    session.propose(DraftBudget(64, 8))
    assert calls == [(0, 1), (1, 3), (2, 6)]


def test_depth_and_missing_features(target: ToyModel) -> None:
    for shape in SHAPES:
        session = session_at(build_engine("hydra:random", shape, target=target), feature_row(), SamplingParams())
        assert 1 <= max(session.propose(DraftBudget(64, 20)).tree.depths) <= 4
        session.observe(Observation([5]))
        assert len(session.propose(DraftBudget(64, 20)).tree) == 1


def test_a_medusa_file_is_no_hydra_file(target: ToyModel, tmp_path: Path) -> None:
    file = head_file(tmp_path / "h", "medusa", target)
    with pytest.raises(ModelFileError, match="--drafter medusa, not hydra"):
        build_engine(f"hydra:{file}", target=target).generate([1], SamplingParams(max_tokens=1))
