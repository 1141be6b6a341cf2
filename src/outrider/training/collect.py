"""``outrider train collect``: a target's answers to prompt files, with its hidden states, as feature shards.

Self-distillation: a head is trained on what its target itself says (Cai et al. 2024, arXiv 2401.10774; Li et al. 2025,
arXiv 2503.01840). Answers that are known already (``answer_tokens.py``) are only read once more for their features.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.engine.loading import LoadedModel
from outrider.errors import InvalidOptionError, UsageError
from outrider.heads.build import three_layers
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.models.fingerprint import fingerprint as model_fingerprint
from outrider.sampling.params import usage_error
from outrider.text.prompt_file import PromptRow
from outrider.text.tokenizer import Tokenizer
from outrider.training.answer_tokens import answer_tokens_digest, read_answers
from outrider.training.collect_folder import MAX_SHARD_BYTES, CollectFolder
from outrider.training.generate import Answer, Feature, answer_all
from outrider.training.prompt_data import Plan, PromptEncoder, RequestQueue, digest, tokens_at_most
from outrider.training.replay import Recorded, replay_all
from outrider.training.shards import Fingerprint, Shard

Temperature = Annotated[float, Field(ge=0.0, le=100.0)]


class CollectOptions(BaseModel):
    """What a collecting run is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    features: tuple[Feature, ...] | None = Field(None, description="hidden states; default: what the heads read")
    repeats: int = Field(1, ge=1, le=1000, description="answers to each prompt")
    temperatures: tuple[Temperature, ...] = Field((0.0, 0.8), min_length=1, description="given to prompts in turn")
    max_new_tokens: int = Field(256, ge=1, le=1_000_000, description="tokens of an answer")
    max_prompt_tokens: int = Field(1024, ge=1, le=1_000_000, description="longer prompts are left out")
    batch: int = Field(32, ge=1, le=1024, description="answers decoded together")
    seed: int = Field(0, ge=0, lt=2**31, description="of all samples")
    shard_megabytes: int = Field(MAX_SHARD_BYTES // 2**20, ge=1, le=64, description="of one feature file, at most")

    @classmethod
    def parse(cls, **values: object) -> CollectOptions:
        """From user input.

        Raises:
            InvalidOptionError: naming the option, its value and what is allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise usage_error(error) from None


@dataclass(slots=True)
class Progress:
    """Where a run stands, reported at its start and after every answer.

    Attributes:
        total, done, skipped: answers of the whole run, those that are there, those left out (too long a prompt).
        tokens: of answers, in this run.
        bytes_at_most: that the features of the whole run take if no answer ends early.
    """

    total: int
    done: int = 0
    skipped: int = 0
    tokens: int = 0
    bytes_at_most: int = 0


Report = Callable[[Progress], None]


def collect(
    loaded: LoadedModel, rows: Sequence[PromptRow], options: CollectOptions, output: Path, report: Report
) -> Progress:
    """Answer ``rows`` into ``output``; what is there already stays. On an interrupt whole answers are kept.

    Raises:
        UsageError: prompts that the target cannot take, another run's folder, or too little room on the disk.
        RunError: when a shard cannot be stored.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    plan, encoder = _plan(model, options), PromptEncoder(tokenizer)
    encoder.check(rows)
    key = target_fingerprint(loaded, options.features)
    settings: dict[str, object] = {"prompts": digest(rows), "repeats": plan.repeats, "seed": plan.seed}
    settings |= {"temperatures": plan.temperatures, "max_new_tokens": plan.max_new_tokens}
    settings |= {"max_prompt_tokens": plan.max_prompt_tokens, "weights": model.weight_format}
    tokens, too_long = tokens_at_most(rows, encoder, plan)
    if too_long and not tokens:
        raise UsageError(f"every prompt has more than {plan.max_prompt_tokens} tokens; raise --max-prompt-tokens")
    at_most = tokens * key.bytes_per_token()
    check_room(output, at_most)
    with CollectFolder(output, key, settings, options.shard_megabytes * 2**20) as folder:
        queue = RequestQueue(rows, encoder, plan, _done(folder.shards))
        done = sum(len(shard) for shard in folder.shards)
        progress = Progress(queue.total, done, bytes_at_most=at_most)
        report(progress)
        answers = answer_all(model, queue, key.features, tokenizer.eos_ids, plan.max_new_tokens, options.batch)
        for answer in answers:
            queue.answered(answer)
            progress.skipped = queue.skipped
            _take(answer, folder, progress, report)
        progress.skipped = queue.skipped
    return progress


def replay(loaded: LoadedModel, answers: Path, options: CollectOptions, output: Path, report: Report) -> Progress:
    """Take the features of the answers in a file of ``export_answers`` into ``output``; resumable as ``collect`` is.

    Raises:
        UsageError: answers of another target or tokenizer, another run's folder, or too little room on the disk.
        RunError: when a shard cannot be stored.
    """
    key = target_fingerprint(loaded, options.features)
    recorded = read_answers(answers, key)
    at_most = sum(len(one.tokens) for one in recorded) * key.bytes_per_token()
    check_room(output, at_most)
    settings = {"answers": answer_tokens_digest(answers), "weights": loaded.model.weight_format}
    with CollectFolder(output, key, settings, options.shard_megabytes * 2**20) as folder:
        done = {index for shard in folder.shards for index in shard.index}
        progress = Progress(len(recorded), len(done), bytes_at_most=at_most)
        report(progress)
        left: Iterator[Recorded] = (one for one in recorded if one.request.index not in done)
        for answer in replay_all(loaded.model, left, key.features):
            _take(answer, folder, progress, report)
    return progress


def target_fingerprint(loaded: LoadedModel, features: Sequence[Feature] | None = None) -> Fingerprint:
    """What feature files of this target carry; by default the hidden states that the trained heads read.

    Raises:
        InvalidOptionError: for a hidden state that the target does not have.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    names = tuple(dict.fromkeys(features or (*three_layers(model.num_layers), FINAL_HIDDEN)))
    for name in names:
        if name != FINAL_HIDDEN and not (isinstance(name, int) and 0 <= name < model.num_layers):
            raise InvalidOptionError(
                f"--features '{name}' is not a hidden state of {loaded.name}: give {FINAL_HIDDEN} or the number of a "
                f"block, 0 to {model.num_layers - 1}"
            )
    target = model_fingerprint(model) or f"name:{loaded.name}"
    dtype = str(model.dtype).removeprefix("torch.")
    template = template_digest(tokenizer)
    return Fingerprint(target, tokenizer.fingerprint(), template, names, model.hidden_size, model.vocab_size, dtype)


def template_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of the chat template, of nothing where there is none."""
    return hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()


def check_room(output: Path, at_most: int) -> None:
    """Refuse a run whose shards may not fit.

    Raises:
        UsageError: naming what the run may take and what is free.
    """
    existing = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    taken = sum(path.stat().st_size for path in output.glob("features-*.safetensors"))
    free = shutil.disk_usage(existing).free
    if at_most - taken > free:
        raise UsageError(
            f"the features may take {(at_most - taken) / 1e9:.2f} GB more but {output} has {free / 1e9:.2f} GB free; "
            "make room, lower --repeats or --max-new-tokens, or choose another --output"
        )


def _plan(model: LanguageModel, options: CollectOptions) -> Plan:
    longest = min(options.max_prompt_tokens, model.context_length - 1)
    return Plan(options.repeats, options.temperatures, options.seed, longest, options.max_new_tokens)


def _done(shards: Sequence[Shard]) -> dict[int, list[int]]:
    """Answer ids by request index."""
    found = {}
    for shard in shards:
        tokens = shard.tokens.tolist()
        for number, index in enumerate(shard.index):
            span = shard.span(number)
            found[index] = tokens[span.start + shard.prompts[number] : span.stop]
    return found


def _take(answer: Answer, folder: CollectFolder, progress: Progress, report: Report) -> None:
    folder.add(answer)
    progress.done += 1
    progress.tokens += len(answer.tokens) - len(answer.request.prompt)
    report(progress)
