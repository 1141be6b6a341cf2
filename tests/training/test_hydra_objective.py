"""What Hydra heads learn: the next token from the feature and the text's own tokens since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from engine.tiny_engines import build_engine
from outrider.heads.build import new_config
from outrider.heads.file import save_head
from outrider.heads.hydra import Hydra
from outrider.models.base import LanguageModel
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.training.batches import BatchReader
from outrider.training.objectives.hydra import HydraObjective, HydraOptions
from outrider.training.packing import open_corpus, pack
from training.counting_language import CountingTarget, counting_batch, top1, train
from training.tiny_llamas import target_on_disk, write_features
from training.unrolled_cases import random_batch

DOCUMENTS = [[(2, 5), (3, 4)], [(1, 9)], [(4, 2), (1, 1), (2, 3)]]


def make(target: LanguageModel, options: dict[str, object] | None = None, **fields: object) -> HydraObjective:
    network = Hydra(new_config("hydra", target, **fields))  # type: ignore[arg-type]
    objective = HydraObjective(network, target, HydraOptions.model_validate(options or {}))
    objective.initialise(0)
    return objective


def scrambled(objective: HydraObjective) -> HydraObjective:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return objective


@pytest.mark.parametrize("fields", [{}, {"own_output": True, "output_bias": True, "blocks": 2}])
def test_every_head_learns_its_own_shift(fields: dict[str, object], tmp_path: Path) -> None:
    target = CountingTarget()
    objective = make(target, steps=4, **fields)
    batch = counting_batch(target, range(11))
    assert max(top1(objective, batch)) < 0.5
    train(objective, batch, 150, 1e-2)
    assert top1(objective, batch) == [1.0] * 4
    file = tmp_path / "head.safetensors"
    save_head(file, objective.network, dtype=torch.float32)
    engine = build_engine(f"hydra:{file}", "chain:6", target=target)
    result = engine.generate([3, 4, 5], SamplingParams(max_tokens=21, ignore_eos=True))
    assert result.tokens == tuple((6 + i) % 11 for i in range(21))
    assert result.stats.num_draft_tokens == result.stats.num_accepted_tokens == 16


def test_loss_by_hand() -> None:
    target = ToyModel(vocab_size=14)
    objective = scrambled(make(target, steps=3))
    batch = random_batch(target, DOCUMENTS)
    found = objective.evaluate(batch, True, 0.0)
    rows, final = target.output_rows(), batch.features["final"]
    for head, step in enumerate(found.steps):
        losses = []
        for b, t in step.mask.nonzero().tolist():
            label = t + 2 + head
            assert batch.answers[b, label]
            assert batch.documents[b, label] == batch.documents[b, t]
            tokens = list(target.embed(batch.tokens[b, t + 1 : label]).float().unbind(0))
            state = objective.network.state(head, feature=final[b, t].float(), tokens=tokens)
            p = torch.softmax(rows @ final[b, label - 1], -1)
            losses.append(-(p * torch.log_softmax(rows.float() @ state, -1)).sum())
        assert step.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert found.loss.item() == pytest.approx(sum(step.loss.item() for step in found.steps))  # no decay


def test_noise_only_while_training() -> None:
    target = ToyModel(vocab_size=14)
    batch = random_batch(target, DOCUMENTS)
    plain, noisy = (scrambled(make(target, {"noise_alpha": alpha})) for alpha in (0.0, 30.0))
    losses = [one.evaluate(batch, True, 0.0).loss.item() for one in (plain, noisy, noisy)]
    assert len(set(losses)) == 3
    assert noisy.evaluate(batch, False, 0.0).loss.item() == pytest.approx(losses[0])


def test_noise_has_the_size_asked_for() -> None:
    target = ToyModel(vocab_size=14)
    batch = random_batch(target, DOCUMENTS)
    objective = make(target, {"noise_alpha": 5.0})
    tokens = torch.zeros(4000, dtype=torch.int64)
    noise = objective.embed(tokens, batch, True) - target.embed(tokens)
    most = 5.0 / (batch.tokens.shape[1] * target.hidden_size) ** 0.5
    assert float(noise.abs().max()) == pytest.approx(most, rel=1e-3)
    assert float(noise.mean()) == pytest.approx(0.0, abs=most / 50)


@pytest.mark.parametrize("options", [{"decay": 0.0}, {"noise_alpha": -1.0}, {"heads": 2}])
def test_refused_options(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        HydraOptions.model_validate(options)


def test_overfit_gate(tmp_path: Path) -> None:
    target = target_on_disk(tmp_path / "target")
    corpus = open_corpus([write_features(tmp_path / "data", target)], ("final",), 32, validation=0.0)
    batch = BatchReader(corpus, ("final",), 8).read(pack(corpus.training, 32))
    objective = make(target.model, {"loss": "hard_cross_entropy"}, steps=3, own_output=True, blocks=2)
    losses = train(objective, batch, 80, 1e-2)
    assert losses[-1] < 0.1 * losses[0]
    assert top1(objective, batch)[0] >= 0.95
