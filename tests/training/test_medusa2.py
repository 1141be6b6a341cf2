"""Medusa-2: adapters, the joint loss, and the new model that comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider.engine.loading import LoadedModel, load_model
from outrider.errors import InvalidOptionError, UsageError
from outrider.heads.file import load_head
from outrider.heads.medusa import Medusa, MedusaConfig
from outrider.models.base import FINAL_HIDDEN, Segment
from outrider.models.fingerprint import fingerprint
from outrider.models.load import open_checkpoint, resolve
from outrider.training.adapters import Adapters
from outrider.training.batch import Batch
from outrider.training.batches import BatchReader, Place
from outrider.training.checkpoint import latest_checkpoint
from outrider.training.objectives.medusa import MedusaObjective
from outrider.training.objectives.medusa2 import Medusa2Objective
from outrider.training.optimizer import OptimizerSettings
from outrider.training.packing import open_corpus
from outrider.training.run_state import LoopSettings, Upkeep
from outrider.training.small_model import TrainableLlama, load_weights
from outrider.training.train_medusa2 import Medusa2Options, TrainedMedusa2, head_path, train_medusa2
from outrider.training.train_model import ModelTraining
from training.tiny_llamas import FLOAT32, VOCABULARY, random_llama, target_on_disk, tiny_config, write_features

TEXT = torch.tensor([[3, 1, 4, 1, 5, 9]])
PLACES = torch.arange(6)[None]


def states(llama: TrainableLlama) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = llama(TEXT, torch.zeros_like(TEXT), PLACES)
    return found


def moved(llama: TrainableLlama, dtype: torch.dtype = torch.float32) -> Adapters:
    """Adapters and norms some way from where they start."""
    adapters = Adapters(llama, rank=4, alpha=8.0, seed=1, frozen=dtype)
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return adapters


def test_untrained_adapters_change_nothing_and_trained_ones_do() -> None:
    before = states(random_llama(tiny_config()))
    llama = random_llama(tiny_config())
    Adapters(llama, rank=4, alpha=8.0)
    torch.testing.assert_close(states(llama), before, atol=0, rtol=0)
    other = random_llama(tiny_config())
    moved(other)
    assert not torch.allclose(states(other), before, atol=0.01)


@pytest.mark.parametrize("is_tied", [True, False])
def test_merged_weights_say_what_the_adapters_say(is_tied: bool) -> None:
    config = tiny_config(tie_embeddings=is_tied)
    llama = random_llama(config)
    adapters = moved(llama)
    merged = TrainableLlama(config)
    merged.load_state_dict(dict(adapters.merged()))
    torch.testing.assert_close(states(merged), states(llama), atol=1e-4, rtol=1e-4)


def test_only_adapters_and_norms_are_trained_and_checkpointed() -> None:
    llama = random_llama(tiny_config())
    total = sum(parameter.numel() for parameter in llama.parameters())
    norms = sum(parameter.numel() for name, parameter in llama.named_parameters() if "norm" in name)
    adapters = Adapters(llama, rank=2)
    config = llama.config
    wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    ends = [hidden + wide, hidden + narrow, hidden + narrow, wide + hidden, *[hidden + inner] * 3]
    stored = sum(tensor.numel() for tensor in adapters.state_dict().values())
    assert stored == norms + 2 * config.num_layers * sum(ends)
    assert stored < total
    assert [
        name for name, parameter in llama.named_parameters() if parameter.requires_grad and "norm" not in name
    ] == []


def joint(tmp_path: Path) -> tuple[LoadedModel, Medusa2Objective, Batch]:
    """An objective over a tiny target and one batch of its own answers."""
    target = target_on_disk(tmp_path / "target")
    corpus = open_corpus([write_features(tmp_path / "features", target)], (FINAL_HIDDEN,), 64, 0.0)
    checkpoint = open_checkpoint(resolve(str(tmp_path / "target")))
    backbone = TrainableLlama(tiny_config())
    load_weights(backbone, checkpoint)
    adapters = Adapters(backbone, rank=4, alpha=8.0)
    shape = {"hidden_size": 32, "vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY, "steps": 3}
    heads = MedusaObjective(
        Medusa(MedusaConfig.model_validate({"method": "medusa", "features": ("final",), **shape})),
        target.model,
        MedusaObjective.Options(),
        torch.float32,
    )
    heads.initialise(0)
    batch = next(BatchReader(corpus, (FINAL_HIDDEN,), 4).training(0, Place()))[1]
    return target, Medusa2Objective(backbone, adapters, heads), batch


def test_at_the_start_nothing_has_moved_and_the_heads_weigh_a_fifth(tmp_path: Path) -> None:
    _, objective, batch = joint(tmp_path)
    found = objective.evaluate(batch, True, 0.0)
    assert found.parts["kl"] == pytest.approx(0.0, abs=1e-5)
    alone = objective.heads.evaluate(batch, True, 0.0)  # on the files' own features, which are the same still
    assert found.parts["heads"] == pytest.approx(float(alone.loss.detach()), rel=1e-4)
    assert float(found.loss.detach()) == pytest.approx(0.2 * found.parts["heads"], rel=1e-4, abs=1e-5)


def test_the_distance_is_that_to_the_target_without_adapters(tmp_path: Path) -> None:
    """Against a computation of its own: mean KL over the rows that predict a token of an answer."""
    target, objective, batch = joint(tmp_path)
    with torch.no_grad():
        for parameter in objective.module["adapters"].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    got = objective.evaluate(batch, True, 0.0).parts["kl"]
    with torch.no_grad():
        now = objective.backbone(batch.tokens, batch.documents, batch.positions) @ objective.backbone.output_matrix.T
    total, count = 0.0, 0
    for row in range(len(batch.tokens)):
        for document in range(int(batch.documents[row].max()) + 1):
            place = (batch.documents[row] == document).nonzero()[:, 0]
            text = batch.tokens[row, place].tolist()
            logits = target.model.forward([Segment(target.model.new_cache(), text)])[0].logits
            for index in range(len(text) - 1):
                if bool(batch.answers[row, place[index + 1]]):
                    p, q = logits[index].log_softmax(-1), now[row, place[index]].log_softmax(-1)
                    total += float((p.exp() * (p - q)).sum())
                    count += 1
    assert got == pytest.approx(total / count, rel=1e-3)
    assert got > 0.001


def asked(tmp_path: Path, tokens: int = 6000, output: str = "new", **changes: object) -> ModelTraining:
    loop = LoopSettings(tokens=tokens, batch_rows=2, validations=2, optimizer=OptimizerSettings(5e-3, weight_decay=0.0))
    values: dict[str, object] = {
        "model": str(tmp_path / "target"),
        "data": [tmp_path / "features"],
        "output": tmp_path / output,
        "loop": loop,
        "upkeep": Upkeep(tmp_path / f"{output}.work", checkpoint_batches=20),
        "vocabulary": 30,
        "row": 64,
        "validation": 0.0,
        "dtype": "float32",
    }
    return ModelTraining(**{**values, **changes})  # type: ignore[arg-type]


OPTIONS = Medusa2Options(heads=2, rank=4, alpha=8.0)


def trained(tmp_path: Path, **changes: object) -> tuple[LoadedModel, TrainedMedusa2]:
    target = target_on_disk(tmp_path / "target")
    write_features(tmp_path / "features", target, answers=8)
    return target, train_medusa2(asked(tmp_path, **changes), OPTIONS, lambda sentence: None)


def test_a_new_model_and_heads_that_fit_it(tmp_path: Path) -> None:
    target, found = trained(tmp_path, tokens=9000)
    first, *_, last = (row for row in found.model.progress.curves if row["kind"] == "training")
    assert last["loss"] < first["loss"] - 0.1
    assert last["top1"][0] > first["top1"][0] + 0.1
    new = load_model(str(found.model.path), FLOAT32)
    assert found.before == fingerprint(target.model)
    assert found.after == fingerprint(new.model) != found.before
    heads = load_head(found.head, "medusa")
    assert found.head == head_path(tmp_path / "new")
    assert (heads.config.target, heads.config.draft_vocab_size) == (found.after, 30)
    card = json.loads((found.model.path / "card.json").read_text())
    assert card["changed_from"] == {"name": target.name, "fingerprint": found.before}
    assert "another model" in card["kind"]
    assert card["adapters"] == "merged into the weights"


def test_a_stopped_run_goes_on_to_the_same_model(tmp_path: Path) -> None:
    _, whole = trained(tmp_path, tokens=3000)
    short = asked(tmp_path, tokens=3000, output="again")

    class StoppedError(Exception):
        pass

    def stop(_: object) -> None:
        if latest_checkpoint(short.upkeep.folder) is not None:
            raise StoppedError

    stopping = Upkeep(short.upkeep.folder, checkpoint_batches=5, report_seconds=0.0, report=stop)
    with pytest.raises(StoppedError):
        train_medusa2(asked(tmp_path, tokens=3000, output="again", upkeep=stopping), OPTIONS, lambda sentence: None)
    left = latest_checkpoint(short.upkeep.folder)
    assert left is not None
    assert 0 < left.tokens < 3000
    train_medusa2(short, OPTIONS, lambda sentence: None)
    one, other = (open_checkpoint(resolve(str(path))) for path in (whole.model.path, short.output))
    for name in one.names():
        torch.testing.assert_close(one.tensor(name), other.tensor(name), atol=0, rtol=0)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="has no weights to train"):
        train_medusa2(asked(tmp_path, model="toy"), OPTIONS, lambda sentence: None)
    target = target_on_disk(tmp_path / "target")
    write_features(tmp_path / "features", target)
    target_on_disk(tmp_path / "other", seed=4)
    with pytest.raises(UsageError, match="another target"):
        train_medusa2(asked(tmp_path, model=str(tmp_path / "other")), OPTIONS, lambda sentence: None)
    with pytest.raises(InvalidOptionError, match="no head file"):
        train_medusa2(asked(tmp_path), Medusa2Options(init=tmp_path / "absent"), lambda sentence: None)
