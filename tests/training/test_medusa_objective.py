"""What Medusa heads learn: the right token at the right shift, weighted 0.8^k, of the target's own distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from engine.tiny_engines import build_engine
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.heads.build import new_config
from outrider.heads.file import save_head
from outrider.heads.medusa import Medusa
from outrider.models.base import LanguageModel
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.training.batches import BatchReader
from outrider.training.medusa_tree import measure_top_k
from outrider.training.objective import simulated_acceptance
from outrider.training.objectives.medusa import MedusaObjective
from outrider.training.objectives.per_depth import PerDepthOptions
from outrider.training.packing import open_corpus, pack
from training.counting_language import CountingTarget, counting_batch, top1, train
from training.tiny_llamas import target_on_disk, write_features
from training.unrolled_cases import random_batch

DOCUMENTS = [[(2, 5), (3, 4)], [(1, 9)], [(4, 2), (1, 1), (2, 3)]]


def make(
    target: LanguageModel,
    draft_ids: list[int] | None = None,
    options: dict[str, object] | None = None,
    **fields: object,
) -> MedusaObjective:
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    network = Medusa(new_config("medusa", target, draft_vocab_size=size, **fields))  # type: ignore[arg-type]
    network.draft_ids = None if draft_ids is None else torch.tensor(draft_ids)
    objective = MedusaObjective(network, target, PerDepthOptions.model_validate(options or {}))
    objective.initialise(0)
    return objective


def scrambled(objective: MedusaObjective) -> MedusaObjective:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return objective


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("loss", ["soft_cross_entropy", "hard_cross_entropy"])
def test_every_head_learns_its_own_shift(own: bool, loss: str, tmp_path: Path) -> None:
    """Liger-Kernel PR#325, Model-Optimizer#1271: first and last head too. The drafter then guesses it all right."""
    target = CountingTarget()
    objective = make(target, options={"loss": loss}, steps=4, own_output=own)
    batch = counting_batch(target, range(11))
    assert max(top1(objective, batch)) < 0.5
    train(objective, batch, 150)
    assert top1(objective, batch) == [1.0] * 4
    file = tmp_path / "head.safetensors"
    save_head(file, objective.network, dtype=torch.float32)
    engine = build_engine(f"medusa:{file}", "chain:6", target=target)  # two deeper than there are heads
    result = engine.generate([3, 4, 5], SamplingParams(max_tokens=21, ignore_eos=True))
    assert result.tokens == tuple((6 + i) % 11 for i in range(21))
    assert result.stats.num_draft_tokens == result.stats.num_accepted_tokens == 16  # 21 - prefill's and 4 bonus tokens


def test_loss_by_hand() -> None:
    """Row by row: labels, teacher's rows and document borders written out; weights 0.8^k."""
    target = ToyModel(vocab_size=14)
    objective = scrambled(make(target, steps=3))
    batch = random_batch(target, DOCUMENTS)
    found = objective.evaluate(batch, True, 0.0)
    rows = target.output_rows()
    total = 0.0
    for head in range(3):
        losses, right = [], 0
        for b, t in torch.ones_like(batch.tokens).nonzero().tolist():
            label = t + 2 + head
            if label >= batch.tokens.shape[1] or not batch.answers[b, label]:
                continue
            if batch.documents[b, label] != batch.documents[b, t]:
                continue
            p = torch.softmax(rows @ batch.features["final"][b, label - 1], -1)
            state = objective.network.state(head, feature=batch.features["final"][b, t].float())
            q = torch.log_softmax(rows.float() @ state, -1)
            losses.append(-(p * q).sum().detach())
            right += int(q.argmax()) == int(p.argmax())
        mean = torch.stack(losses).mean()
        total += 0.8**head * mean.item()
        assert found.steps[head].loss.item() == pytest.approx(mean.item(), rel=1e-4)
        assert int(found.steps[head].mask.sum()) == len(losses)
        assert int(found.steps[head].correct.sum()) == right
        assert found.parts[f"head {head + 1}"] == pytest.approx(float(mean), rel=1e-4)
    assert found.loss.item() == pytest.approx(total, rel=1e-4)


def test_hard_labels_are_the_text() -> None:
    target = ToyModel(vocab_size=14)
    objective = scrambled(make(target, options={"loss": "hard_cross_entropy", "decay": 1.0}, steps=2))
    batch = random_batch(target, DOCUMENTS)
    found = objective.evaluate(batch, True, 0.0)
    for head, step in enumerate(found.steps):
        b, t = step.mask.nonzero(as_tuple=True)
        state = objective.network.state(head, feature=batch.features["final"][b, t].float())
        logits = state @ target.output_rows().float().T
        expected = F.cross_entropy(logits, batch.tokens[b, t + 2 + head])
        assert step.loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert found.loss.item() == pytest.approx(sum(step.loss.item() for step in found.steps))


def test_reduced_vocabulary() -> None:
    """Tokens that cannot be guessed are misses, not lessons; hits are counted in target ids (SpecForge#534)."""
    target = CountingTarget()
    ids = [1, 2, 3, 5, 8, 10]
    objective = make(target, ids, steps=2)
    batch = counting_batch(target, range(11))
    train(objective, batch, 150)
    steps = objective.evaluate(batch, False, 1.0).steps
    for head, step in enumerate(steps):
        b, t = step.mask.nonzero(as_tuple=True)
        can = torch.isin(batch.tokens[b, t + 2 + head], torch.tensor(ids))
        assert bool(can.any())
        assert not bool(can.all())
        assert torch.equal(step.correct[b, t], can)
        assert step.overlap <= float(can.sum()) + 1e-3


def test_overlap_is_acceptance_under_the_true_distribution() -> None:
    target = ToyModel(vocab_size=14)
    ids = [0, 2, 3, 7, 8, 9, 13]
    objective = scrambled(make(target, ids, steps=2))
    batch = random_batch(target, DOCUMENTS)
    training = objective.evaluate(batch, True, 0.0).steps
    assert all(step.overlap != step.overlap for step in training)  # NaN
    for head, step in enumerate(objective.evaluate(batch, False, 1.0).steps):
        expected = 0.0
        for b, t in step.mask.nonzero().tolist():
            p = torch.softmax(target.output_rows() @ batch.features["final"][b, t + 1 + head], -1)[ids]
            state = objective.network.state(head, feature=batch.features["final"][b, t].float())
            q = torch.softmax(target.output_rows(torch.tensor(ids)).float() @ state, -1)
            expected += torch.minimum(p, q).sum().item()
        assert step.overlap == pytest.approx(expected, rel=1e-4)


def test_nothing_to_learn_is_no_nan() -> None:
    """A batch of padding and prompts only."""
    target = ToyModel(vocab_size=14)
    objective = make(target)
    batch = random_batch(target, [[(9, 0)], [(3, 0)]])
    result = objective.evaluate(batch, True, 0.0)
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in objective.parameters())


def test_starts_from_the_target() -> None:
    target = ToyModel(vocab_size=14)
    own = make(target, own_output=True)
    for head in range(4):
        torch.testing.assert_close(own.network.state_dict()[f"{head}.1.weight"], target.output_rows().float())
    assert own.method == "medusa"
    assert own.features == ("final",)


def test_a_soft_capped_targets_rows_are_capped_for_the_heads_too() -> None:
    target = ToyModel(vocab_size=14)
    target.final_soft_cap = 0.5
    network = make(target).network
    state = 30.0 * torch.randn((5, 8), generator=torch.Generator().manual_seed(1))
    capped = network.logits(0, state)
    network.bind(target.output_rows().float())
    plain = network.logits(0, state)
    torch.testing.assert_close(capped.double(), 0.5 * torch.tanh(plain.double() / 0.5), atol=1e-5, rtol=1e-5)
    assert float(plain.abs().max()) > 0.5


@pytest.mark.parametrize("options", [{"decay": 0.0}, {"decay": 1.1}, {"loss": "mse"}, {"steps": 3}])
def test_refused_options(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PerDepthOptions.model_validate(options)


def test_top_k_accuracy() -> None:
    """Rank by rank, against the definition; what comes out makes a tree."""
    target = ToyModel(vocab_size=14)
    ids = [0, 2, 3, 5, 7, 8, 9, 13]
    objective = scrambled(make(target, ids, steps=2))
    batches = [random_batch(target, DOCUMENTS, seed) for seed in (0, 1)]
    found = measure_top_k(objective, batches, 3)
    for head in range(2):
        hits = torch.zeros(3)
        count = 0
        for batch in batches:
            for b, t in objective.evaluate(batch, False, 1.0).steps[head].mask.nonzero().tolist():
                state = objective.network.state(head, feature=batch.features["final"][b, t].float())
                order = (target.output_rows(torch.tensor(ids)).float() @ state).argsort(descending=True)
                hits += torch.tensor([ids[int(order[rank])] == int(batch.best[b, t + 1 + head]) for rank in range(3)])
                count += 1
        assert found.positions[head] == count
        assert found.shares[head] == pytest.approx((hits / count).tolist())


def test_top_k_needs_positions() -> None:
    target = ToyModel(vocab_size=14)
    with pytest.raises(ValueError, match="too short"):
        measure_top_k(make(target), [random_batch(target, [[(2, 3)]])], 3)


def test_overfit_gate(tmp_path: Path) -> None:
    """8 sequences of a tiny Llama: the first head learns 95% of them, and decoding keeps what was simulated.

    Labels are hard: distributions of a random target are nearly flat, so that their best token is learnt last.
    """
    target = target_on_disk(tmp_path / "target")
    corpus = open_corpus([write_features(tmp_path / "data", target)], ("final",), 32, validation=0.0)
    batch = BatchReader(corpus, ("final",), 8).read(pack(corpus.training, 32))
    objective = make(target.model, options={"loss": "hard_cross_entropy"}, steps=3, own_output=True, blocks=2)
    train(objective, batch, 80, 1e-2)
    assert top1(objective, batch)[0] >= 0.95
    with torch.no_grad():
        kept, positions = simulated_acceptance(objective.evaluate(batch, False, 1.0).steps)
    save_head(tmp_path / "head.safetensors", objective.network, dtype=torch.float32)
    config = EngineConfig(
        model="tiny", drafter=f"medusa:{tmp_path / 'head.safetensors'}", shape="chain:3", adaptive=False
    )
    engine = Engine(config, target)
    tokens = steps = 0
    for piece in corpus.training:
        text = corpus.shards[0].tokens[piece.start : piece.stop].tolist()
        stats = engine.generate(text[: piece.prompt], SamplingParams(max_tokens=24, ignore_eos=True)).stats
        tokens += stats.num_accepted_tokens + stats.num_drafts
        steps += stats.num_drafts
    assert tokens / steps == pytest.approx(kept / positions, abs=0.3)
    assert tokens / steps > 3.0
