"""Whole trainings that end in a model, not in a head: what they share, and ``train small-model``.

Everything that can be refused is refused before the first batch. A boosted training ranks the answers first
(``boosting.py``) and keeps the ranking in the work folder, for on much data it takes as long as many batches.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider import __version__
from outrider.config import EngineConfig
from outrider.engine.build import check_draft_vocabulary
from outrider.engine.loading import LoadedModel, choose_device, load_model
from outrider.errors import InvalidOptionError
from outrider.models.base import FINAL_HIDDEN
from outrider.models.fingerprint import fingerprint
from outrider.models.load import open_checkpoint, resolve
from outrider.text.vocabulary import vocabulary_hash
from outrider.training.boosting import agreements, read_agreements, select, write_agreements
from outrider.training.curves import write_curves
from outrider.training.draft_vocabulary import choose_draft_ids, coverage
from outrider.training.loop import Trainer
from outrider.training.model_directory import check_place, write_model
from outrider.training.objectives.small_model import SmallModelObjective
from outrider.training.packing import Corpus, open_corpus
from outrider.training.run_state import LoopSettings, Progress, Upkeep
from outrider.training.small_model import LlamaConfig, TrainableLlama, llama_config, load_weights, small_config, start
from outrider.training.train_head import Note, check_target, load_target, tell_corpus
from outrider.training.work_folder import work_folder


@dataclass(frozen=True, slots=True)
class ModelTraining:
    """What all trainings of a model are told.

    Attributes:
        model: the target's name.
        data: feature folders.
        output: model directory to write.
        vocabulary: tokens that losses look at (the most frequent ones); 0 for all.
        row: tokens of a packed row.
        validation: share of the requests kept for validation.
        device, dtype: as ``EngineConfig``.
        restart: forget the checkpoints of ``upkeep.folder``.
        command: for the card.
    """

    model: str
    data: list[Path]
    output: Path
    loop: LoopSettings
    upkeep: Upkeep
    vocabulary: int = 8192
    row: int = 512
    validation: float = 0.02
    device: str = "auto"
    dtype: str = "auto"
    restart: bool = False
    command: str = ""


@dataclass(frozen=True, slots=True)
class SmallModelOptions:
    """The shape of the small model, and what it is trained against.

    Attributes:
        hidden, layers, heads, intermediate, context: sizes.
        negatives: rarer tokens drawn for each batch.
        boost_against: earlier models, as ``--draft-model`` takes them.
        boost_weight: see ``boosting.select``.
        init: model to go on from, as a new training; its sizes are taken.
    """

    hidden: int = 192
    layers: int = 2
    heads: int = 3
    intermediate: int = 512
    context: int = 1024
    negatives: int = 1024
    boost_against: tuple[str, ...] = ()
    boost_weight: int = 0
    init: str | None = None


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The outcome.

    Attributes:
        path, curves: what was written.
        bytes: of the weight file.
        card: as stored with the model.
    """

    path: Path
    curves: Path
    bytes: int
    progress: Progress
    card: dict[str, Any]


def train_small_model(asked: ModelTraining, options: SmallModelOptions, note: Note) -> TrainedModel:
    """Train a small model from scratch (or on from ``init``) to draft for a target.

    Args:
        note: called with sentences that the user should see.

    Raises:
        UsageError: wrong options, data of another target, or a folder that holds another training.
        RunError: the training diverged or something cannot be stored.
        KeyboardInterrupt: after Ctrl-C; a checkpoint was written.
    """
    check_place(asked.output)
    config = small_config(1, **_sizes(options))  # refuses impossible sizes before anything is loaded
    loaded = load_target(asked.model, asked.device, asked.dtype)
    corpus = open_model_corpus(asked, loaded, note)
    earlier = [_load_earlier(name, asked, loaded) for name in options.boost_against]
    device = choose_device(asked.device)
    frequent = frequent_tokens(corpus, asked.vocabulary, loaded)
    note(f"losses look at {len(frequent)} tokens, {coverage(_counts(corpus), frequent):.1%} of the answers' text")
    config = small_config(loaded.model.vocab_size, **_sizes(options))
    module = _starting(options, config, loaded, frequent, asked.loop.seed)
    rows = loaded.model.output_rows().to(device, asked.loop.dtype)
    objective = SmallModelObjective(
        module.to(device).train(), rows, loaded.model.final_soft_cap, frequent.to(device), options.negatives
    )
    described = {
        **describe(asked, "small_model", corpus),
        "negatives": options.negatives,
        "boost_against": [_key(one) for one in earlier],
        "boost_weight": options.boost_weight,
        "init": None if options.init is None else digest(module),
        **module.config.model_dump(mode="json"),
    }
    with work_folder(asked.upkeep.folder, asked.output):
        training = _boosted(asked, options, corpus, earlier, note) if earlier else corpus
        progress = Trainer(objective, training, asked.loop, asked.upkeep, described, asked.restart).run()
        card = model_card(asked, training, loaded, progress) | {
            "kind": "small model, trained by distillation",
            "sizes": module.config.model_dump(mode="json"),
            "boosted_against": list(options.boost_against),
            "boost_weight": options.boost_weight,
            "init": options.init,
        }
        size = write_model(asked.output, module.config, module.state_dict(), loaded.tokenizer, card)
        curves = write_curves(asked.output.parent, progress.curves, asked.output.name + ".curves.jsonl")
    return TrainedModel(asked.output, curves, size, progress, card)


# -- what trainings of a model share ---------------------------------------------------------------------------


def open_model_corpus(asked: ModelTraining, loaded: LoadedModel, note: Note) -> Corpus:
    """The target's answers; says what of them is left out.

    Raises:
        UsageError: data that cannot be used, or of another target.
    """
    corpus = open_corpus(asked.data, (FINAL_HIDDEN,), asked.row, asked.validation)
    check_target(corpus, loaded, asked.data[0])
    tell_corpus(corpus, note, asked.loop.keep_best)
    return corpus


def frequent_tokens(corpus: Corpus, size: int, loaded: LoadedModel) -> Tensor:
    """The tokens that losses look at, ascending int64."""
    every = torch.arange(loaded.model.vocab_size)
    found = choose_draft_ids(_counts(corpus), size, loaded.tokenizer) if size else None
    return every if found is None else found


def describe(asked: ModelTraining, method: str, corpus: Corpus) -> dict[str, Any]:
    """What decides the result beside the loop's settings and the method's own, by the names that the user knows."""
    own = {"method": method, "data": corpus.identity(), "row": asked.row, "validation": asked.validation}
    return {**own, "vocabulary": asked.vocabulary}


def model_card(asked: ModelTraining, corpus: Corpus, loaded: LoadedModel, progress: Progress) -> dict[str, Any]:
    """How the model was made."""
    counts = corpus.counts()
    return {
        "command": asked.command,
        "outrider": __version__,
        "torch": torch.__version__,
        "target": loaded.name,
        "tokenizer": vocabulary_hash(loaded.tokenizer),
        "data": {"identity": corpus.identity(), "fingerprint": corpus.fingerprint.to_json(), **counts},
        "tokens": progress.tokens,
        "epochs": round(progress.tokens / max(1, counts["training_tokens"]), 2),
        "seed": asked.loop.seed,
        "learning_rate": asked.loop.optimizer.learning_rate,
        "hours": round(progress.seconds / 3600, 3),
        "validation": None if progress.validation is None else progress.validation.as_json(),
    }


def digest(module: nn.Module) -> str:
    """Of all numbers of a module, as a short key."""
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:24]


def _counts(corpus: Corpus) -> Tensor:
    return corpus.answer_counts(corpus.training)


# -- the small model -------------------------------------------------------------------------------------------


def _sizes(options: SmallModelOptions) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("hidden", "layers", "heads", "intermediate", "context")}


def _starting(
    options: SmallModelOptions, config: LlamaConfig, loaded: LoadedModel, frequent: Tensor, seed: int
) -> TrainableLlama:
    if options.init is None:
        module = TrainableLlama(config)
        start(module, loaded.model.output_rows().float().cpu(), frequent, seed)
        return module
    checkpoint = open_checkpoint(resolve(options.init))
    found = llama_config(checkpoint.config).model_copy(update={"method": config.method})
    if found.vocab_size != config.vocab_size:
        raise InvalidOptionError(
            f"--init {options.init} has {found.vocab_size} tokens, the target {config.vocab_size}; give a model of it"
        )
    module = TrainableLlama(found)
    load_weights(module, checkpoint)
    return module


def _load_earlier(name: str, asked: ModelTraining, target: LoadedModel) -> LoadedModel:
    config = EngineConfig(model=name, device=asked.device, dtype=asked.dtype)
    earlier = load_model(name, config, sharing=target)
    check_draft_vocabulary(target, earlier)
    return earlier


def _boosted(
    asked: ModelTraining, options: SmallModelOptions, corpus: Corpus, earlier: list[LoadedModel], note: Note
) -> Corpus:
    keys = [corpus.identity(), *(_key(one) for one in earlier), str(asked.row), str(asked.validation)]
    path, identity = asked.upkeep.folder / "agreement.safetensors", " ".join(keys)
    agreement = read_agreements(path, identity)
    if agreement is None:
        note(f"reading {len(corpus.training)} answers with {len(earlier)} earlier models, to boost against them")
        agreement = agreements(corpus, [one.model for one in earlier], _Tenths(note).told)
        write_agreements(path, agreement, identity)
    chosen = select(corpus, agreement, options.boost_weight)
    note(
        f"the earlier models agree with {float(agreement.mean()):.1%} of an answer's tokens, the median answer's "
        f"{float(agreement.median()):.1%}; {len(chosen.training)} answers are trained on"
    )
    return chosen


def _key(earlier: LoadedModel) -> str:
    return fingerprint(earlier.model) or earlier.name


class _Tenths:
    """Says how far a count is, ten times in all."""

    def __init__(self, note: Note) -> None:
        self._note, self._said = note, 0

    def told(self, done: int, total: int) -> None:
        if 10 * done // total > self._said:
            self._said = 10 * done // total
            self._note(f"{done} of {total} answers read")
