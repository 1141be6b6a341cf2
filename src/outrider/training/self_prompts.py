"""Prompts that the target writes itself: it continues the start of a user turn of its own chat template.

An instruction-tuned model that is given nothing but the opening of the user's turn samples what its users say (Xu et
al. 2024, arXiv 2406.08464). Turns are sampled at temperature 1, each under a seed of its own, and kept in a journal
beside the output, so that a killed run goes on; ``prompt_filter.py`` then decides in the order of their numbers, so the
output is a function of target, seed and count. Knows no hidden states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from outrider.engine.loading import LoadedModel
from outrider.errors import InvalidOptionError, RunError, UsageError
from outrider.models.whole_file import whole_file
from outrider.text.tokenizer import Tokenizer
from outrider.training.collect import target_fingerprint
from outrider.training.collect_folder import hold
from outrider.training.generate import Request, answer_all
from outrider.training.prompt_filter import Bounds, ExcludedTexts, PromptFilter, Written

_PLACE = "outrider-place-of-the-users-text"
_SEEDS = 1 << 62
"""Bit that keeps the seeds of self-written prompts apart from those of answers."""


@dataclass(frozen=True, slots=True)
class SelfPromptOptions:
    """How many turns are written, and which are kept.

    Attributes:
        count: turns sampled; fewer are kept.
        seed: of all samples, below 2^29.
        max_new_tokens: a turn that is longer is dropped.
        batch: turns decoded together.
        bounds: lengths kept.
    """

    count: int
    seed: int = 0
    max_new_tokens: int = 256
    batch: int = 48
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, slots=True)
class WrittenPrompts:
    """What came of it: prompts kept, and turns dropped by each rule."""

    kept: int
    dropped: dict[str, int]


def user_turn_start(tokenizer: Tokenizer) -> list[int]:
    """Ids of the chat template up to where the user's text begins.

    Raises:
        InvalidOptionError: when the model has no template, or it does not write the user's text once, as it is.
    """
    text = tokenizer.render_chat([{"role": "user", "content": _PLACE}])
    if text.count(_PLACE) != 1:
        raise InvalidOptionError("the chat template does not write the user's text as it is; give a file of prompts")
    ids = tokenizer.encode(text[: text.index(_PLACE)], add_special_tokens=False)
    if not ids:
        raise InvalidOptionError("the chat template begins with the user's text, so nothing says whose turn it is")
    return ids


def write_prompts(
    loaded: LoadedModel,
    options: SelfPromptOptions,
    excluded: ExcludedTexts,
    output: Path,
    report: Callable[[int, int], None],
) -> WrittenPrompts:
    """Sample turns, filter them, write ``output`` as JSON lines of ``prompt`` and ``source``.

    Args:
        loaded: the target.
        options: how many, and which are kept.
        excluded: evaluation texts that no prompt may be close to.
        output: replaced when all turns are there; ``OUTPUT.turns`` beside it is the journal.
        report: turns sampled so far, and in all.

    Raises:
        UsageError: no usable chat template, or a journal of another run.
        RunError: when a file cannot be stored; the same command goes on.
    """
    start = user_turn_start(loaded.tokenizer)
    with closing(Journal(output.with_name(output.name + ".turns"), _settings(loaded, options))) as journal:
        _sample(loaded, options, start, journal, report)
        keep = PromptFilter(excluded, options.bounds)
        kept = [text for n in range(options.count) if (text := keep.keep(journal.turns[n])) is not None]
        _replace(output, "".join(json.dumps({"prompt": t, "source": "self"}, ensure_ascii=False) + "\n" for t in kept))
    return WrittenPrompts(len(kept), dict(keep.dropped))


def _sample(
    loaded: LoadedModel,
    options: SelfPromptOptions,
    start: list[int],
    journal: Journal,
    report: Callable[[int, int], None],
) -> None:
    """Write the turns that are missing into the journal."""
    missing = [number for number in range(options.count) if number not in journal.turns]
    report(options.count - len(missing), options.count)
    requests = (Request(n, start, 1.0, _SEEDS | (options.seed << 32) | n) for n in missing)
    tokenizer = loaded.tokenizer
    written = answer_all(loaded.model, requests, (), tokenizer.eos_ids, options.max_new_tokens, options.batch)
    for done, answer in enumerate(written, options.count - len(missing) + 1):
        ids = answer.tokens[len(start) : len(answer.tokens) - answer.is_finished]
        has_specials = not tokenizer.special_ids.isdisjoint(ids)
        journal.add(answer.request.index, Written(tokenizer.decode(ids), answer.is_finished, has_specials))
        report(done, options.count)


class Journal:
    """Turns by number, appended to a file one line each; its first line says what they depend on.

    Raises:
        UsageError: when the file is of another run, or cannot be opened.
    """

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self.path = path
        self.turns: dict[int, Written] = {}
        try:
            self._stream = path.open("a", encoding="utf-8")
            hold(self._stream, path)
            data = path.read_bytes()
            complete = data.rfind(b"\n") + 1
            if complete:
                self._read(data[:complete].decode().split("\n"), settings)
            if complete < len(data):  # a killed run tore its last line
                os.truncate(path, complete)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}; choose another --output") from None
        if not complete:
            self._append(settings)

    def add(self, number: int, turn: Written) -> None:
        """Keep a turn, on the disk too.

        Raises:
            RunError: when it cannot be stored.
        """
        self._append({"n": number, "text": turn.text, "finished": turn.is_finished, "specials": turn.has_specials})
        self.turns[number] = turn

    def close(self) -> None:
        """Let others have the file."""
        with suppress(OSError):  # what could not be stored was reported by ``add``
            self._stream.close()

    def _read(self, lines: list[str], settings: dict[str, object]) -> None:
        try:
            found = json.loads(lines[0])
            for line in lines[1:-1]:
                row = json.loads(line)
                self.turns[row["n"]] = Written(row["text"], row["finished"], row["specials"])
            different = [name for name, value in settings.items() if found.get(name) != value]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{self.path} was not written by 'outrider train prompts'; choose another --output"
            ) from None
        if different:
            name = different[0]
            raise UsageError(
                f"{self.path} was begun with {name}={found.get(name)!r}, now it is {settings[name]!r}; use the same or "
                "another --output"
            )

    def _append(self, row: dict[str, object]) -> None:
        try:
            self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._stream.flush()
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror or error}; make room and run it again") from None


def _settings(loaded: LoadedModel, options: SelfPromptOptions) -> dict[str, object]:
    """What turns depend on (not their count, and not the filter)."""
    key = target_fingerprint(loaded)
    names = {"target": key.target, "tokenizer": key.tokenizer, "template": key.template}
    return names | {"seed": options.seed, "max_new_tokens": options.max_new_tokens}


def _replace(path: Path, text: str) -> None:
    with whole_file(path, "make room and run it again") as part:
        part.write_text(text, encoding="utf-8")
