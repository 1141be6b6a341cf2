"""``train medusa2``: backbone and Medusa heads together -> a new model directory and the head file that goes with it.

The adapters are merged into the weights at the end: the new model runs like any other, at the old one's cost. It is
ANOTHER MODEL, which its card and the result say. The heads are of the new model and carry its fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.loading import TOYS, LoadedModel, choose_device
from outrider.errors import InvalidOptionError, UnsupportedModelError
from outrider.heads.file import save_head
from outrider.heads.medusa import Medusa, MedusaConfig
from outrider.heads.per_depth import PerDepthNetwork
from outrider.models.base import FINAL_HIDDEN
from outrider.models.decoder import Decoder
from outrider.models.load import open_checkpoint, resolve
from outrider.text.vocabulary import vocabulary_hash
from outrider.training.adapters import Adapters
from outrider.training.collect import target_fingerprint
from outrider.training.curves import write_curves
from outrider.training.loop import Trainer
from outrider.training.methods import head_config
from outrider.training.model_directory import check_place, write_model
from outrider.training.objectives.medusa import MedusaObjective
from outrider.training.objectives.medusa2 import Medusa2Objective
from outrider.training.objectives.per_depth import PerDepthOptions
from outrider.training.small_model import TrainableLlama, llama_config, load_weights
from outrider.training.train_head import Note, load_target, read_init
from outrider.training.train_model import (
    ModelTraining,
    TrainedModel,
    describe,
    digest,
    frequent_tokens,
    model_card,
    open_model_corpus,
)
from outrider.training.work_folder import work_folder


@dataclass(frozen=True, slots=True)
class Medusa2Options:
    """What is trained, and how the two parts weigh.

    Attributes:
        heads: number of Medusa heads.
        rank, alpha: of the adapters.
        weight: of the heads' loss.
        head_rate: the heads' learning rate relative to the backbone's.
        init: Medusa head file to start the heads from (stage 1 of the paper's two).
    """

    heads: int = 4
    rank: int = 32
    alpha: float = 16.0
    weight: float = 0.2
    head_rate: float = 4.0
    init: Path | None = None


@dataclass(frozen=True, slots=True)
class TrainedMedusa2:
    """The new model, its heads' file, and the fingerprints of the target before and after."""

    model: TrainedModel
    head: Path
    before: str
    after: str


def head_path(output: Path) -> Path:
    """Where the heads of the model directory ``output`` go."""
    return output.with_name(output.name + ".medusa.safetensors")


def train_medusa2(asked: ModelTraining, options: Medusa2Options, note: Note) -> TrainedMedusa2:
    """Train adapters and heads; write the merged model and its heads.

    Raises:
        UsageError: wrong options, data of another target, or a folder that holds another training.
        UnsupportedModelError: a target that is no Llama of our decoder.
        RunError: the training diverged or something cannot be stored.
        KeyboardInterrupt: after Ctrl-C; a checkpoint was written.
    """
    check_place(asked.output)
    if asked.model in TOYS:
        raise InvalidOptionError(f"model '{asked.model}' is a table: it has no weights to train; give another --model")
    loaded = load_target(asked.model, asked.device, asked.dtype)
    corpus = open_model_corpus(asked, loaded, note)
    backbone = _backbone(asked, loaded)
    heads = _heads(asked, options, loaded, frequent_tokens(corpus, asked.vocabulary, loaded), note)
    adapters = Adapters(backbone, options.rank, options.alpha, asked.loop.seed, asked.loop.dtype)
    objective = Medusa2Objective(
        backbone, adapters.to(choose_device(asked.device)), heads, options.weight, options.head_rate
    )
    own = {"rank": options.rank, "alpha": options.alpha, "weight": options.weight, "head_rate": options.head_rate}
    init = None if options.init is None else digest(heads.network)
    described = {
        **describe(asked, "medusa2", corpus), **own, "init": init, **heads.network.config.model_dump(mode="json")
    }  # fmt: skip
    with work_folder(asked.upkeep.folder, asked.output):
        progress = Trainer(objective, corpus, asked.loop, asked.upkeep, described, asked.restart).run()
        before = target_fingerprint(loaded, (FINAL_HIDDEN,)).target
        card = model_card(asked, corpus, loaded, progress) | {
            "kind": f"Medusa-2: this is another model than {loaded.name}, which it was trained from",
            "adapters": "merged into the weights",
            "changed_from": {"name": loaded.name, "fingerprint": before},
            "init": None if options.init is None else str(options.init),
            **own,
        }
        size = write_model(asked.output, backbone.config, dict(adapters.merged()), loaded.tokenizer, card)
        changed = load_target(str(asked.output), asked.device, asked.dtype)
        after = target_fingerprint(changed, (FINAL_HIDDEN,)).target
        head = _save_heads(asked, heads.network, after, card)
        curves = write_curves(asked.output.parent, progress.curves, asked.output.name + ".curves.jsonl")
    return TrainedMedusa2(TrainedModel(asked.output, curves, size, progress, card), head, before, after)


def _backbone(asked: ModelTraining, loaded: LoadedModel) -> TrainableLlama:
    """The target's weights in float32, on the training device."""
    if not isinstance(loaded.model, Decoder):
        raise UnsupportedModelError(
            f"'{loaded.name}' runs through transformers; Medusa-2 trains Llama models of our own decoder only. "
            "'outrider train medusa' leaves the target as it is"
        )
    checkpoint = open_checkpoint(resolve(asked.model))
    backbone = TrainableLlama(llama_config(checkpoint.config))
    load_weights(backbone, checkpoint)
    return backbone.to(choose_device(asked.device)).train()


def _heads(
    asked: ModelTraining, options: Medusa2Options, loaded: LoadedModel, draft_ids: Tensor, note: Note
) -> MedusaObjective:
    """Medusa's objective with new heads, or those of a file."""
    if options.init is None:
        fields = {"steps": options.heads, "draft_vocab_size": len(draft_ids)}
        identity = {"tokenizer": vocabulary_hash(loaded.tokenizer)}
        config = head_config("medusa", loaded.model, fields, identity)
        assert isinstance(config, MedusaConfig)
        network = Medusa(config)
        network.draft_ids = draft_ids if len(draft_ids) < loaded.model.vocab_size else None
    else:
        network = _read_heads(options, loaded, len(draft_ids), note)
    network.to(choose_device(asked.device)).train().requires_grad_(True)
    objective = MedusaObjective(network, loaded.model, PerDepthOptions(), asked.loop.dtype)
    if options.init is None:
        objective.initialise(asked.loop.seed)
    return objective


def _read_heads(options: Medusa2Options, loaded: LoadedModel, draft_vocab: int, note: Note) -> Medusa:
    assert options.init is not None
    network = read_init(options.init, "medusa", loaded)
    assert isinstance(network, Medusa)  # what the registry makes of a file of that method
    config = network.config
    if (config.steps, config.draft_vocab_size) != (options.heads, draft_vocab):
        note(f"{options.init} keeps its {config.steps} heads and its {config.draft_vocab_size} tokens")
    return network


def _save_heads(asked: ModelTraining, network: PerDepthNetwork[Any], target: str, card: dict[str, Any]) -> Path:
    path = head_path(asked.output)
    network.config = network.config.model_copy(update={"target": target})
    save_head(path, network.eval(), {**card, "target": str(asked.output)}, torch.float32)
    return path
