"""The fine test: stored steps of an engine, replayed; 1% of total variation is noticed, the right rules pass."""

from __future__ import annotations

import pytest
import torch

from audit.biased_verifiers import BiasedBy1Percent
from engine.tiny_engines import build_engine
from outrider.audit.replay import ReplayRow, count_first_tokens, replay_audit
from outrider.audit.report import Status, replay_report
from outrider.audit.stored_step import Draws, StoredStep, capture_steps, store_step
from outrider.engine.engine import Engine
from outrider.engine.registry import VERIFIERS, load_class
from outrider.models.toy import ToyModel
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.trees.merge import merge
from outrider.trees.token_tree import TokenTree, Trial
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.multi_step import MultiStep

PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
IID, WOR = ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT
DETERMINISTIC, PER_SOURCE = ProposalKind.DETERMINISTIC, ProposalKind.PER_SOURCE


def engine(drafter: str = "layer_skip", shape: str | None = "chain:3", kind: ProposalKind | None = IID) -> Engine:
    return build_engine(drafter, shape, kind, target=ToyModel(40, order=1, sharpness=1.2, seed=3))


def steps_of(built: Engine, count: int = 4) -> list[StoredStep]:
    return capture_steps(built, [[1, 2, 3, 1, 2, 3, 1, 2]], PARAMS, count, 0)


def failed(rows: list[ReplayRow]) -> bool:
    return any(not test.passed for row in rows for test in row.tests)


# -- what is stored ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind", "children"),
    [("chain:3", IID, 1), ("widths:3,2", IID, 3), ("widths:3,2", WOR, 3), ("widths:3,2", DETERMINISTIC, 3)],
)
def test_a_stored_step_draws_what_the_shape_draws(shape: str, kind: ProposalKind, children: int) -> None:
    steps = steps_of(engine(shape=shape, kind=kind))
    assert len(steps) == 4
    for step in steps:
        tree = step.draw(1, SeededStream(0))
        assert (step.kind, tree.kind, step.children) == (kind, kind, children)
        assert len(tree.trials(0)) == children
        assert set(tree.depths) <= {0, 1}
        assert float(step.p.sum()) == pytest.approx(1.0)
        assert 0.0 < step.overlap < 1.0
        if kind is not DETERMINISTIC:
            again = step.draw(9, SeededStream(0))
            assert float(tree.rows[0].sum()) == pytest.approx(1.0)
            assert len({tuple(t.token for t in x.trials(0)) for x in (tree, again, step.draw(21, SeededStream(1)))}) > 1


def test_relabelling_keeps_the_probabilities() -> None:
    """The 64 best of p and of q keep a label, a fixed child too; what is left shares one."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand((2, 500), generator=generator, dtype=torch.float64) ** 8
    p, q = p / p.sum(), q / q.sum()
    drawn = TokenTree(7, IID)
    row = drawn.add_row(q)
    for token in (3, 5, 3):
        drawn.add(0, token, "draft", row)
    worst = int(p.argmin())
    fixed = TokenTree(7)
    fixed.add(0, worst, "ngram")
    step = store_step(2, 9, merge(drawn, fixed), p)
    assert (step.prompt, step.position, step.kind, step.children) == (2, 9, PER_SOURCE, 4)
    assert step.tokens[-1] == -1
    assert {*p.topk(64).indices.tolist(), *q.topk(64).indices.tolist(), worst} == set(step.tokens[:-1])
    kept = list(step.tokens[:-1])
    assert step.p[:-1].tolist() == p[kept].tolist()
    assert float(step.p[-1]) == pytest.approx(1.0 - float(p[kept].sum()))
    sampled, deterministic = step.draws
    assert (sampled.kind, sampled.count, deterministic.kind) == (IID, 3, DETERMINISTIC)
    assert sampled.q is not None
    assert sampled.q[:-1].tolist() == q[kept].tolist()
    assert [step.tokens[label] for label in deterministic.labels] == [worst]


def test_certain_steps_are_left_out() -> None:
    cold = SamplingParams(temperature=0.01, max_tokens=24)
    assert capture_steps(engine(), [[1, 2, 3]], cold, 4, 0) == []
    report = replay_report(replay_audit([], MultiStep(), 1_000, 0))
    assert report.status is Status.EMPTY


def test_the_engine_is_left_as_it_was() -> None:
    built = engine()
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=4)
    before = built.generate([1, 2, 3], params).tokens
    steps_of(built)
    assert built.generate([1, 2, 3], params).tokens == before


# -- what is found -----------------------------------------------------------------------------------------------


def claimed() -> list[tuple[str, str, ProposalKind]]:
    """Every registered exact rule on every kind that these drafters make and it claims above temperature 0."""
    shapes = {"chain:3": Topology.CHAIN, "widths:2,1": Topology.TREE}
    kinds = [("chain:3", IID), ("widths:2,1", IID), ("widths:2,1", WOR), ("widths:2,1", DETERMINISTIC)]
    return [
        (name, shape, kind)
        for name in VERIFIERS
        for shape, kind in kinds
        if (kind, shapes[shape], Regime.SAMPLED) in load_class("verifier", name).exact_for
    ]


@pytest.mark.parametrize(("verifier", "shape", "kind"), claimed())
def test_exact_verifiers_pass(verifier: str, shape: str, kind: ProposalKind) -> None:
    rows = replay_audit(steps_of(engine(shape=shape, kind=kind), 2), load_class("verifier", verifier)(), 3_000, 1)
    assert not failed(rows)
    assert all(row.distance < 2.0 * row.chance for row in rows)


def test_merged_drafters_pass() -> None:
    built = engine("ensemble:(layer_skip@chain:2)+(replay@widths:2,1)", None, None)
    steps = steps_of(built, 2)
    assert {step.kind for step in steps} == {PER_SOURCE}
    assert {len(step.draws) for step in steps} == {2}
    assert not failed(replay_audit(steps, MultiStep(), 6_000, 0))


def test_a_bias_of_1_percent_is_detected() -> None:
    """At the default 200,000 replays."""
    rows = replay_audit(steps_of(engine(), 1), BiasedBy1Percent(), 200_000, 0)
    assert failed(rows)
    report = replay_report(rows)
    assert report.status is Status.FAILED
    assert report.notes


def test_the_right_rule_passes_where_the_biased_one_fails() -> None:
    calls: list[tuple[int, int]] = []
    rows = replay_audit(steps_of(engine(), 2), MultiStep(), 60_000, 0, lambda a, b: calls.append((a, b)))
    assert not failed(rows)
    assert [row.prompt for row in rows] == [0, 0, None]
    assert rows[-1].replays == 60_000
    assert calls[0] == (1_000, 60_000)
    assert calls[-1] == (60_000, 60_000)


def test_a_wrong_q_is_detected() -> None:
    """The tree is drawn from another q than the one that the verifier is given: the classic mistake."""

    class AnotherTemperature(MultiStep):
        def proposal_of(self, tree: TokenTree, trial: Trial) -> torch.Tensor | None:
            q = super().proposal_of(tree, trial)
            return None if q is None else q**2 / (q**2).sum()

    assert failed(replay_audit(steps_of(engine(), 1), AnotherTemperature(), 8_000, 0))


def test_reproducible() -> None:
    steps = steps_of(engine(), 1)
    first, again, other = (count_first_tokens(steps[0], MultiStep(), 500, seed)[0].tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_replay_draws_its_own_children() -> None:
    """Were one tree replayed, the first token would follow another law than p, however right the verifier."""
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    q = torch.tensor([0.75, 0.25], dtype=torch.float64)
    step = StoredStep(0, 1, IID, p, (Draws(IID, 1, q),), (0, 1))
    counts, accepted = count_first_tokens(step, MultiStep(), 4_000, 0)
    assert counts[0] / 4_000 == pytest.approx(0.25, abs=0.03)
    assert accepted / 4_000 == pytest.approx(0.5, abs=0.03)
