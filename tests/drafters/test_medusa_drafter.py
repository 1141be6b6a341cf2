"""Medusa as a drafter: head d's distribution at every node of depth d, exact under every rule, as deep as its heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.per_depth_cases import IDS, SHAPES, feature_row, session_at
from engine.tiny_engines import build_engine, engine_law, random_prompts
from heads.tiny_heads import head_file
from outrider.config import EngineConfig
from outrider.drafters.base import DraftBudget, Observation
from outrider.drafters.medusa import MedusaDrafter, MedusaSource
from outrider.drafters.model_source import RowSource
from outrider.engine.engine import Engine
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.heads.file import load_head, save_head
from outrider.heads.medusa import Medusa
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Regime
from training.objectives_of import head_rows
from training.tiny_llamas import target_on_disk


def drafter_of(engine: Engine) -> MedusaDrafter:
    drafter = engine._lanes[Regime.GREEDY].drafter
    assert isinstance(drafter, MedusaDrafter)
    return drafter


@pytest.fixture
def target() -> ToyModel:
    return ToyModel(vocab_size=12, order=2, seed=3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids", [None, IDS])
def test_greedy_text_is_the_targets(shape: str, ids: list[int] | None, target: ToyModel, tmp_path: Path) -> None:
    plain = build_engine(target=target)
    engine = build_engine(f"medusa:{head_file(tmp_path / 'h', 'medusa', target, ids)}", shape, target=target)
    accepted = 0
    for prompt in random_prompts(3, 12):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        result = engine.generate(prompt, params)
        assert result.tokens == plain.generate(prompt, params).tokens
        assert result.stats.num_draft_tokens > 0
        accepted += result.stats.num_accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize(
    ("shape", "proposal", "verifier"),
    [
        ("chain:3", ProposalKind.IID, "block"),
        ("widths:2,1", ProposalKind.IID, "multi_step"),
        ("widths:2,2", ProposalKind.WITHOUT_REPLACEMENT, "multi_step"),
        ("static:0/1/0.0", ProposalKind.WITHOUT_REPLACEMENT, "traversal"),
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
    """Invariant 2, with the same q at all nodes of a depth, and with tokens that the heads cannot guess."""
    tiny = ToyModel(vocab_size=3, seed=4, sharpness=1.0)
    params = SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.3, max_tokens=3, ignore_eos=True)
    drafter = f"medusa:{head_file(tmp_path / 'h', 'medusa', tiny, ids)}"
    law, accepted = engine_law(
        monkeypatch, build_engine(drafter, shape, proposal, verifier, target=tiny), [1, 2], params
    )
    expected, _ = engine_law(monkeypatch, build_engine(target=tiny), [1, 2], params)
    assert accepted > 0
    assert max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in {*law, *expected}) < 1e-9


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)])
def test_candidates_are_the_training_forms(
    ids: list[int] | None, params: SamplingParams, target: ToyModel, tmp_path: Path
) -> None:
    """Depth d's children come from head d at the row that predicted the root, in target ids, whatever the path."""
    file = head_file(tmp_path / "h", "medusa", target, ids)
    engine = build_engine(f"medusa:{file}", "widths:2,2,2,1", ProposalKind.DETERMINISTIC, target=target)
    feature = feature_row()
    tree = session_at(engine, feature, params).propose(DraftBudget(64, 8)).tree
    rows = head_rows(load_head(file), target, feature)
    pipeline = LogitsPipeline(params, 12)
    assert max(tree.depths) == 4
    for node in range(len(tree)):
        children = [tree.tokens[child] for child, parent in enumerate(tree.parents) if parent == node]
        if children:
            scores = pipeline.ranking(rows[tree.depths[node]], [])
            assert children == scores.argsort(descending=True)[: len(children)].tolist()


def test_sampled_proposals_carry_the_heads_distribution(target: ToyModel, tmp_path: Path) -> None:
    file = head_file(tmp_path / "h", "medusa", target, IDS)
    engine = build_engine(f"medusa:{file}", "widths:3,2", ProposalKind.IID, target=target)
    params = SamplingParams(temperature=0.8, top_k=5)
    feature = feature_row()
    tree = session_at(engine, feature, params).propose(DraftBudget(64, 8)).tree
    rows = head_rows(load_head(file), target, feature)
    pipeline = LogitsPipeline(params, 12)
    assert len(list(tree.trials(0))) == 3
    for node in range(len(tree)):
        for trial in tree.trials(node):
            expected = pipeline.probabilities(rows[tree.depths[node]], [])
            torch.testing.assert_close(tree.rows[trial.row], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_sharing_a_depths_row_changes_nothing(penalty: float, target: ToyModel, tmp_path: Path) -> None:
    """Nodes of mixed depths ranked together: as the plain row source ranks them, with and without penalties."""
    file = head_file(tmp_path / "h", "medusa", target, IDS)
    network = drafter_of(build_engine(f"medusa:{file}", target=target)).network
    assert isinstance(network, Medusa)
    pipeline = LogitsPipeline(SamplingParams(temperature=0.9, frequency_penalty=penalty), 12, prompt=[1])
    source = MedusaSource("medusa", network, feature_row().float(), 4, pipeline, [4])
    tree = TokenTree(4)
    first, second = tree.extend([0, 0], [2, 3])
    deep = tree.extend([first, second, second], [8, 9, 1])
    nodes = [deep[0], first, deep[2], second, deep[1]]
    for least in (None, torch.tensor([0.0, 0.1, 0.2, 0.0, 0.15]).double().numpy()):
        found = source.ranked(tree, nodes, 3, least)
        plain = RowSource.ranked(source, tree, nodes, 3)
        kept = {(int(o), int(t)): float(s) for o, t, s in zip(found.owners, found.tokens, found.scores, strict=True)}
        for owner, token, score in zip(plain.owners, plain.tokens, plain.scores, strict=True):
            if least is None or score >= least[owner]:
                assert kept[int(owner), int(token)] == pytest.approx(float(score), rel=1e-5)
        assert found.owners.tolist() == sorted(found.owners.tolist())
        assert least is not None or len(kept) == len(plain.owners)
    for one, other in zip(source.candidates(tree, nodes), RowSource.candidates(source, tree, nodes), strict=True):
        assert one.probabilities is not None
        assert other.probabilities is not None
        torch.testing.assert_close(one.probabilities, other.probabilities)


def test_no_deeper_than_there_are_heads(target: ToyModel) -> None:
    for shape in SHAPES:
        tree = (
            session_at(build_engine("medusa:random", shape, target=target), feature_row(), SamplingParams())
            .propose(DraftBudget(64, 20))
            .tree
        )
        assert 1 <= max(tree.depths) <= 4
        shallow = session_at(build_engine("medusa:random", shape, target=target), feature_row(), SamplingParams())
        assert max(shallow.propose(DraftBudget(64, 2)).tree.depths) <= 2


def test_without_features_there_are_no_guesses(target: ToyModel) -> None:
    """A row that was not observed: the session waits for the next one instead of guessing from an old one."""
    engine = build_engine("medusa:random", "chain:3", target=target)
    session = session_at(engine, None, SamplingParams())
    assert len(session.propose(DraftBudget(8, 8)).tree) == 1
    session.observe(Observation([5], {"final": feature_row()}))
    assert len(session.propose(DraftBudget(8, 8)).tree) == 4
    session.observe(Observation([6]))
    assert len(session.propose(DraftBudget(8, 8)).tree) == 1


def test_the_newest_row_counts(target: ToyModel) -> None:
    engine = build_engine("medusa:random", "chain:4", target=target)
    rows = torch.cat([feature_row(seed=seed) for seed in (1, 2, 3)])
    many, one = (session_at(engine, feature_row(seed=9), SamplingParams()) for _ in range(2))
    many.observe(Observation([1, 2, 6], {"final": rows}, prompt_hidden={"final": feature_row(seed=7)}))
    one.observe(Observation([6], {"final": rows[2:]}))
    trees = [session.propose(DraftBudget(8, 8)).tree for session in (many, one)]
    assert trees[0].tokens == trees[1].tokens


def test_the_target_may_keep_its_cache(target: ToyModel) -> None:
    """Nothing older than the newest row is read: a repeated prompt needs no prefill of features."""
    session = session_at(build_engine("medusa:random", target=target), feature_row(), SamplingParams())
    assert session.reusable([7, 7, 7]) == 3


def test_a_second_request_on_the_same_session_starts_afresh(target: ToyModel, tmp_path: Path) -> None:
    engine = build_engine(f"medusa:{head_file(tmp_path / 'h', 'medusa', target)}", "chain:4", target=target)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    first = engine.generate([3, 4, 5], params)
    again = engine.generate([3, 4, 5], params)
    assert (first.tokens, first.stats.num_accepted_tokens) == (again.tokens, again.stats.num_accepted_tokens)


def test_typical_acceptance_must_be_asked_for(target: ToyModel) -> None:
    with pytest.raises(IllegalCombinationError, match="--lossy"):
        build_engine("medusa:random", "static", ProposalKind.DETERMINISTIC, "typical", target=target).generate(
            [1, 2], SamplingParams(temperature=0.8)
        )
    engine = build_engine("medusa:random", "static", ProposalKind.DETERMINISTIC, "typical", target=target, lossy=True)
    result = engine.generate([1, 2], SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True))
    assert len(result.tokens) == 20


def test_a_head_of_another_method_or_target(target: ToyModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="no head file"):
        build_engine(f"medusa:{tmp_path / 'none'}", target=target).generate([1], SamplingParams(max_tokens=1))
    other = head_file(tmp_path / "other", "medusa", ToyModel(vocab_size=13))
    with pytest.raises(IllegalCombinationError, match="vocabulary 13"):
        build_engine(f"medusa:{other}", target=target).generate([1], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("own", [False, True])
def test_packed_products_on_a_real_decoder(own: bool, tmp_path: Path) -> None:
    """float32 on a CPU: the drafter's packed network guesses what the plain one does; greedy text is unchanged."""
    loaded = target_on_disk(tmp_path / "target")
    network = Medusa(Medusa.Config.model_validate({  # type: ignore[arg-type]
        "method": "medusa", "hidden_size": 32, "vocab_size": 40, "draft_vocab_size": 40, "own_output": own, "blocks": 2,
    }))  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    save_head(tmp_path / "h", network, dtype=torch.float32)
    engines = [
        Engine(EngineConfig(model="tiny", drafter=name, shape=shape, adaptive=False), loaded)
        for name, shape in ((f"medusa:{tmp_path / 'h'}", "widths:2,2,1"), ("none", None))
    ]
    drafter = drafter_of(engines[0])
    feature = feature_row(32).float()
    assert isinstance(drafter.network, Medusa)
    found = drafter.network.all_logits(feature, 4)[:, 0]
    torch.testing.assert_close(found, head_rows(network, loaded.model, feature), atol=1e-4, rtol=1e-4)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len({engine.generate([3, 4, 5], params).tokens for engine in engines}) == 1
