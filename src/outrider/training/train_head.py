"""A whole training of a draft head: model, data, draft vocabulary, loop -> a head file with its card and its curves.

The order matters: everything that can be refused is refused before the first batch, and a draft vocabulary is chosen
for new heads only: a checkpoint's, or that of the head which ``init`` names, is kept as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from outrider import __version__
from outrider.config import EngineConfig
from outrider.drafters.base import DraftParts
from outrider.drafters.head_options import check_head
from outrider.engine.loading import TOYS, LoadedModel, choose_device, choose_dtype, load_model
from outrider.errors import InvalidOptionError, UsageError
from outrider.heads.file import load_head, save_head
from outrider.heads.network import DraftNetwork, RecurrentNetwork
from outrider.heads.registry import network_class
from outrider.models.base import FINAL_HIDDEN
from outrider.sampling.params import usage_error
from outrider.text.vocabulary import vocabulary_hash
from outrider.training.checkpoint import latest_checkpoint
from outrider.training.collect import target_fingerprint
from outrider.training.curves import write_curves
from outrider.training.draft_vocabulary import LEAST_COVERAGE, choose_draft_ids, coverage
from outrider.training.loop import Trainer
from outrider.training.methods import head_config, make_objective, split_options
from outrider.training.packing import Corpus, open_corpus
from outrider.training.run_state import LoopSettings, Progress, Upkeep
from outrider.training.work_folder import work_folder

DRAFT_IDS = "draft_ids"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """What to train, as the user says it.

    Attributes:
        method, model: registered name; the target's name.
        data: feature folders.
        output: head file to write.
        draft_vocab: tokens that the head can guess; 0, or as many as the target has, for all.
        steps: unrolled steps or heads; ``None`` for the method's default.
        row: tokens of a packed row.
        validation: share of the requests kept for validation.
        whole_text: whether prompts are supervised too, see ``open_corpus``.
        device, dtype: as ``EngineConfig``.
        init: head file to go on from, as a new training.
        restart: forget the checkpoints of ``upkeep.folder``.
        options: NAME -> text, for the objective or the head.
        command: for the card.
    """

    method: str
    model: str
    data: list[Path]
    output: Path
    loop: LoopSettings
    upkeep: Upkeep
    draft_vocab: int = 8192
    steps: int | None = None
    row: int = 512
    validation: float = 0.02
    whole_text: bool = False
    device: str = "auto"
    dtype: str = "auto"
    init: Path | None = None
    restart: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome.

    Attributes:
        path, curves: what was written.
        progress: where the loop ended.
        card: as stored in the head.
    """

    path: Path
    curves: Path
    progress: Progress
    card: dict[str, Any]


def train_head(asked: HeadTraining, note: Note) -> Trained:
    """Train as ``asked``, going on from the newest checkpoint.

    Args:
        note: called with sentences that the user should see.

    Raises:
        UsageError: wrong options, data of another target, or a folder that holds another training.
        RunError: the training diverged or something cannot be stored.
        KeyboardInterrupt: after Ctrl-C; a checkpoint was written.
    """
    if asked.output.is_dir():
        raise InvalidOptionError(f"--output {asked.output} is a directory; give the head file's name")
    options, fields = split_options(asked.method, asked.options, asked.steps)
    loaded = load_target(asked.model, asked.device, asked.dtype)
    start = _starting_head(asked, loaded, fields, note)
    is_unrolled = isinstance(start, RecurrentNetwork)
    if asked.init is not None and "steps" in type(options).model_fields and not (is_unrolled and asked.steps):
        options = options.model_copy(update={"steps": start.config.steps})
    needed = tuple(dict.fromkeys((*start.config.features, FINAL_HIDDEN)))
    corpus = open_corpus(asked.data, needed, asked.row, asked.validation, whole_text=asked.whole_text)
    check_target(corpus, loaded, asked.data[0])
    tell_corpus(corpus, note, asked.loop.keep_best)
    network = _network(asked, start, corpus, loaded)
    covered = _coverage(corpus, network.draft_ids)
    if covered is not None and covered < LEAST_COVERAGE:
        note(
            f"the draft vocabulary covers {covered:.1%} of the validation answers' tokens; a larger --draft-vocab "
            "would raise acceptance"
        )
    network.to(choose_device(asked.device)).train().requires_grad_(True)
    objective = make_objective(network, loaded.model, options)
    if asked.init is None:
        objective.initialise(asked.loop.seed)
    map_ = {} if network.draft_ids is None else {DRAFT_IDS: network.draft_ids}
    described = _described(asked, corpus, network, options)
    with work_folder(asked.upkeep.folder, asked.output):
        progress = Trainer(objective, corpus, asked.loop, asked.upkeep, described, asked.restart, map_).run()
        card = _card(asked, corpus, loaded, progress, covered, options)
        save_head(asked.output, network.eval(), card)
        curves = write_curves(asked.output.parent, progress.curves, asked.output.stem + ".curves.jsonl")
    return Trained(asked.output, curves, progress, card)


def load_target(name: str, device: str, dtype: str) -> LoadedModel:
    """The target, in the dtype that training computes in."""
    return load_model(name, target_config(name, device, "auto" if name in TOYS else dtype))


def target_config(name: str, device: str, dtype: str) -> EngineConfig:
    """How the target is loaded.

    Raises:
        InvalidOptionError: for a device or dtype that does not exist.
    """
    try:
        return EngineConfig.model_validate({"model": name, "device": device, "dtype": dtype})
    except ValidationError as error:
        raise usage_error(error) from None


def check_target(corpus: Corpus, loaded: LoadedModel, where: Path) -> None:
    """Refuse data that another target answered.

    Raises:
        UsageError: naming what differs.
    """
    own = target_fingerprint(loaded, (FINAL_HIDDEN,))  # the data's own states may be of blocks that it does not have
    different = [name for name in corpus.fingerprint.differences(own) if name not in ("dtype", "features")]
    if different:
        raise UsageError(
            f"{where} was collected from another {' and '.join(different)} than that of '{loaded.name}'; collect data "
            f"with 'outrider train collect --model {loaded.name}', or give the --model that it is of"
        )


def _starting_head(asked: HeadTraining, loaded: LoadedModel, fields: dict[str, Any], note: Note) -> DraftNetwork[Any]:
    """The head to go on from, or a new one; a new one's draft vocabulary is still missing."""
    model = loaded.model
    if asked.init is None:
        key = target_fingerprint(loaded, (FINAL_HIDDEN,)).target
        size = min(asked.draft_vocab or model.vocab_size, model.vocab_size)
        identity = {"target": key, "tokenizer": vocabulary_hash(loaded.tokenizer)}
        config = head_config(asked.method, model, {**fields, "draft_vocab_size": size}, identity)
        return network_class(asked.method)(config)
    network = read_init(asked.init, asked.method, loaded)
    if asked.draft_vocab != network.config.draft_vocab_size:
        note(f"{asked.init} keeps its draft vocabulary of {network.config.draft_vocab_size} tokens")
    for name, value in fields.items():
        found = getattr(network.config, name)
        if str(found).casefold() != str(value).casefold() and (name != "steps" or asked.steps is not None):
            raise InvalidOptionError(f"{asked.init} has {name}={found}; {name}={value} needs a new head (no --init)")
    return network


def read_init(path: Path, method: str, loaded: LoadedModel) -> DraftNetwork[Any]:
    """The head file ``path``, which must be of ``method`` and of the target.

    Raises:
        InvalidOptionError: when it does not exist.
        ModelFileError: when it is damaged or of another method.
        IllegalCombinationError: when it was made for another target.
    """
    if not path.is_file():
        raise InvalidOptionError(f"no head file '{path}' to start from; give a file of 'outrider train {method}'")
    network = load_head(path, method)
    check_head(network, DraftParts(loaded.model, vocabulary_hash=partial(vocabulary_hash, loaded.tokenizer)), str(path))
    return network


def _network(asked: HeadTraining, start: DraftNetwork[Any], corpus: Corpus, loaded: LoadedModel) -> DraftNetwork[Any]:
    """``start`` with its draft vocabulary: its own, the checkpoint's, or a new one, in this order."""
    if asked.init is not None or start.config.draft_vocab_size == start.config.vocab_size:
        return start
    found = None if asked.restart else latest_checkpoint(asked.upkeep.folder)
    ids = None if found is None else found.tensors.get(DRAFT_IDS)
    if ids is None or len(ids) != start.config.draft_vocab_size:  # the latter is refused with its name later
        counts = corpus.answer_counts(corpus.training)
        ids = choose_draft_ids(counts, start.config.draft_vocab_size, loaded.tokenizer)
    start.draft_ids = ids
    return start


def _coverage(corpus: Corpus, draft_ids: Tensor | None) -> float | None:
    """Of the validation answers; of the training ones where there are none."""
    return coverage(corpus.answer_counts(corpus.validation or corpus.training), draft_ids)


def tell_corpus(corpus: Corpus, note: Note, keep_best: bool) -> None:
    """Say what of the data is left out, and when there is nothing for ``keep_best`` to choose by."""
    if corpus.cut:
        note(f"{corpus.cut} answers are longer than a row of {corpus.row} tokens: their first tokens are left out")
    if corpus.unanswered:
        note(f"{corpus.unanswered} answers are empty and left out")
    if not corpus.validation:
        last = "; --keep-best has nothing to choose by, so the last numbers are kept" if keep_best else ""
        note(f"no answers are kept for validation: the figures are those of the training answers{last}")


def _described(asked: HeadTraining, corpus: Corpus, network: DraftNetwork[Any], options: BaseModel) -> dict[str, Any]:
    """What decides the result beside the loop's settings, by the names that the user knows."""
    init = None if asked.init is None else hashlib.sha256(asked.init.read_bytes()).hexdigest()[:24]
    own = {"method": asked.method, "data": corpus.identity(), "init": init, "row": asked.row}
    own |= {"whole_text": True} if asked.whole_text else {}
    return {**own, "validation": asked.validation, **options.model_dump(), **network.config.model_dump(mode="json")}


def _card(
    asked: HeadTraining,
    corpus: Corpus,
    loaded: LoadedModel,
    progress: Progress,
    covered: float | None,
    options: BaseModel,
) -> dict[str, Any]:
    """How the head was made."""
    counts = corpus.counts()
    return {
        "command": asked.command,
        "outrider": __version__,
        "torch": torch.__version__,
        "target": loaded.name,
        "data": {"identity": corpus.identity(), "fingerprint": corpus.fingerprint.to_json(), **counts},
        "objective": options.model_dump(),
        "draft_vocabulary_coverage": None if covered is None else round(covered, 5),
        "tokens": progress.tokens,
        "epochs": round(progress.tokens / max(1, counts["training_tokens"]), 2),
        "batches": progress.batches,
        "seed": asked.loop.seed,
        "learning_rate": asked.loop.optimizer.learning_rate,
        "hours": round(progress.seconds / 3600, 3),
        "init": None if asked.init is None else str(asked.init),
        "validation": None if progress.validation is None else progress.validation.as_json(),
    }


def training_dtype(name: str, device: str) -> torch.dtype:
    """``--dtype`` of a training: of products; parameters are float32 in any case."""
    config = target_config("", device, name)
    return choose_dtype(config.dtype, choose_device(config.device))
