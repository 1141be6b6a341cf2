"""Guesses judged by another distribution than the one that they were drawn from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.tiny_engines import build_engine, distance, engine_law, letters_tokenizer
from outrider.drafters.small_model import SmallModelSession
from outrider.engine.registry import VERIFIERS, load_class
from outrider.models.toy import ToyModel
from outrider.sampling.draw import Role, SeededStream
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Regime, Topology
from user_issues.toy_decoding import chain_law, step_by_step


class NotesDraws(SeededStream):
    """A seeded stream that notes the distribution of every draft draw and what was drawn."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(seed)
        self.drawn: list[tuple[Tensor, int]] = []

    def categorical(self, probabilities: Tensor, position: int, role: Role, draw: int) -> int:
        token = super().categorical(probabilities, position, role, draw)
        if role is Role.DRAFT:
            self.drawn.append((probabilities / probabilities.sum(), token))
        return token


@pytest.mark.parametrize(("shape", "kind"), [("chain:3", "iid"), ("widths:2,2", "without_replacement")])
def test_q_mismatch_top_k_draft_u12(monkeypatch: pytest.MonkeyPatch, shape: str, kind: str) -> None:
    """Guesses were drawn from filtered logits and judged by unfiltered ones.

    The q of every trial is, to the last bit, the distribution that the stream drew from; the law is the target's.
    """
    rows = [[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.4, 0.25, 0.35]]
    target = ToyModel.from_table(rows)
    draft = ToyModel.from_table([[0.2, 0.45, 0.35], [0.5, 0.1, 0.4], [0.35, 0.4, 0.25]])
    tokenizer = letters_tokenizer(3, with_end=False)
    engine = build_engine(
        "small_model", shape, ProposalKind(kind), target=target, draft=draft, tokenizer=tokenizer, max_nodes=3
    )
    params = SamplingParams(temperature=0.8, top_k=2, max_tokens=12, seed=12)
    stream = NotesDraws(12)
    judged: list[tuple[Tensor, int]] = []
    observe = SmallModelSession.observe

    def look(session: SmallModelSession, observation: object) -> None:
        if (tree := session.tree) is not None:
            trials = [trial for node in range(len(tree)) for trial in tree.trials(node)]
            judged.extend((tree.trial_distribution(trial), trial.token) for trial in trials)
        observe(session, observation)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("outrider.engine.engine.SeededStream", lambda seed: stream)
        patch.setattr(SmallModelSession, "observe", look)
        list(step_by_step(engine, [0], params))
    assert len(judged) == len(stream.drawn) > 5
    for (q, token), (drawn_from, drawn) in zip(judged, stream.drawn, strict=True):
        assert torch.equal(q, drawn_from)
        assert int((q > 0).sum()) <= 2
        assert token == drawn
    kept = [[p if p in sorted(row)[1:] else 0.0 for p in row] for row in rows]
    powered = [[p ** (1 / 0.8) for p in row] for row in kept]
    expected = chain_law([[p / sum(row) for p in row] for row in powered], 0, 3)
    law, accepted = engine_law(monkeypatch, engine, [0], params.model_copy(update={"max_tokens": 3}))
    assert distance(law, expected) < 1e-12
    assert accepted > 0


def test_q_mismatch_argmax_draft_u13(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft took its argmax whatever the temperature, and was judged as if it had sampled.

    An argmax guess has a one-hot q: the law of the output is the target's, p = [.5, .3, .2] at every position.
    """
    rows, opinion = [[0.5, 0.3, 0.2]] * 3, [[0.25, 0.55, 0.2]] * 3
    engine = build_engine(
        "small_model",
        "chain:2",
        ProposalKind.DETERMINISTIC,
        target=ToyModel.from_table(rows),
        draft=ToyModel.from_table(opinion),
        tokenizer=letters_tokenizer(3, with_end=False),
    )
    law, accepted = engine_law(monkeypatch, engine, [0], SamplingParams(temperature=1.0, max_tokens=4))
    assert accepted == 2
    assert distance(law, chain_law(rows, 0, 4)) < 1e-12


CHAINS = [
    (name, kind)
    for name in VERIFIERS
    for kind in ProposalKind
    if kind is not ProposalKind.PER_SOURCE
    and (kind, Topology.CHAIN, Regime.GREEDY) in load_class("verifier", name).exact_for
]


@pytest.mark.parametrize(("name", "kind"), CHAINS)
def test_q_mismatch_temperature_zero_is_one_hot_u15(name: str, kind: ProposalKind) -> None:
    """At temperature 0 a guess a passed the ratio test: q(a) = .2 was its softmax, p(a) = .3, though p(b) = .5.

    At temperature 0 both are one-hot: b is emitted by every rule that may be used there, whatever the seed.
    """
    target = ToyModel.from_table([[0.3, 0.5, *[0.05] * 4]] * 6)
    draft = ToyModel.from_table([[0.2, *[0.16] * 5]] * 6)
    tokenizer = letters_tokenizer(6, with_end=False)
    engine = build_engine("small_model", "chain:1", kind, name, target=target, draft=draft, tokenizer=tokenizer)
    for seed in range(10):
        result = engine.generate([5], SamplingParams(max_tokens=6, seed=seed))
        assert result.tokens == (1,) * 6
        assert result.stats.num_draft_tokens > 0
