"""Answers every prompt of a file: a queue into ``Engine.run``, a progress bar on stderr, a row for each prompt."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from outrider.cli import engine_factory
from outrider.cli.answer_file import AnswerFile, pending
from outrider.cli.options import EngineOptions
from outrider.cli.progress import counting_bar
from outrider.cli.tables import stats_table
from outrider.errors import InvalidOptionError, UsageError
from outrider.sampling.params import SamplingParams
from outrider.text.prompt_file import Message, PromptRow, read_prompts

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.result import Result


@dataclass(frozen=True, slots=True)
class FileRun:
    """Where prompts come from, where answers go, and how many are decoded together."""

    file: Path
    output: Path | None
    batch: int
    raw: bool
    stats: bool


@dataclass(slots=True)
class _Conversation:
    """A row on its way: turns answered so far."""

    row: PromptRow
    results: list[Result] = field(default_factory=list)
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is not None or len(self.results) == max(1, len(self.row.turns))

    def next_prompt(self) -> str | list[Message]:
        if self.row.messages:
            return list(self.row.messages)
        if len(self.row.turns) == 1:
            return self.row.turns[0]
        messages: list[Message] = []
        for turn, result in zip(self.row.turns, self.results, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": result.text}]
        return [*messages, {"role": "user", "content": self.row.turns[len(self.results)]}]


class _Queue:
    """Requests for ``Engine.run``. It may run empty and be filled again: an answer brings the next turn."""

    def __init__(self, engine: Engine, params: SamplingParams, raw: bool, rows: list[PromptRow]) -> None:
        self._engine, self._params, self._raw = engine, params, raw
        self._waiting = deque(_Conversation(row) for row in rows)
        self.refused: list[_Conversation] = []

    def __iter__(self) -> Iterator[tuple[object, list[int], SamplingParams]]:
        return self

    def __next__(self) -> tuple[object, list[int], SamplingParams]:
        while self._waiting:
            conversation = self._waiting.popleft()
            try:
                tokens = self._engine.encode(conversation.next_prompt(), raw=self._raw)
                _check_length(self._engine, tokens)
            except UsageError as error:
                conversation.error = str(error)
                self.refused.append(conversation)
                continue
            return conversation, tokens, self._params
        raise StopIteration

    def put_first(self, conversation: _Conversation) -> None:
        """The conversation's next turn goes before new conversations."""
        self._waiting.appendleft(conversation)


def run_file(run: FileRun, options: EngineOptions, params: SamplingParams) -> None:
    """Answer what is not answered yet; exit code 1 when a row could not be answered.

    Raises:
        UsageError: unreadable prompts, or an output that does not fit these settings.
    """
    if run.batch < 1:
        raise InvalidOptionError(f"--batch {run.batch} is not allowed: it must be at least 1")
    if run.output is not None and run.output.absolute() == run.file.absolute():
        raise UsageError("--output is the file of prompts itself; choose another")
    rows = read_prompts(run.file)
    if run.raw and any(row.messages or len(row.turns) > 1 for row in rows):
        raise UsageError("--raw works with single prompts only; conversations need the chat template")
    answers = None if run.output is None else AnswerFile(run.output, _settings(run, options, params))
    try:
        todo = pending(rows, answers.done if answers else set())
        errors = Console(stderr=True)
        if len(todo) < len(rows):
            errors.print(f"{len(rows) - len(todo)} of {len(rows)} rows are answered already", highlight=False)
        if todo:
            engine = engine_factory.load_engine(options, params.regime)
            _answer_rows(engine, run, params, todo, answers, errors)
    finally:
        if answers:
            answers.close()


def _answer_rows(
    engine: Engine,
    run: FileRun,
    params: SamplingParams,
    rows: list[PromptRow],
    answers: AnswerFile | None,
    errors: Console,
) -> None:
    from outrider.engine.stats import combine

    queue = _Queue(engine, params, run.raw, rows)
    stats, failed = combine(()), 0
    with counting_bar(errors) as progress:
        task = progress.add_task("prompts", total=len(rows))
        with closing(_finished(engine, queue, run.batch)) as finished:
            for conversation in finished:
                _write(conversation, answers)
                failed += conversation.error is not None
                stats = combine((stats, *(result.stats for result in conversation.results)))
                progress.advance(task)
    if run.stats:
        errors.print(stats_table({"all prompts": stats}))
    if failed:
        errors.print(f'{failed} of {len(rows)} rows could not be answered; each has an "error"', highlight=False)
        raise typer.Exit(1)


def _finished(engine: Engine, queue: _Queue, batch: int) -> Generator[_Conversation]:
    """Conversations as they finish or are refused."""
    with closing(engine.run(queue, batch=batch)) as running:  # type: ignore[type-var]
        for conversation, result in running:
            assert isinstance(conversation, _Conversation)  # our own key, not user input
            conversation.results.append(result)
            if conversation.is_complete:
                yield conversation
            else:
                queue.put_first(conversation)
            while queue.refused:
                yield queue.refused.pop()
    while queue.refused:
        yield queue.refused.pop()


def _write(conversation: _Conversation, answers: AnswerFile | None) -> None:
    row, results = conversation.row, conversation.results
    found: dict[str, object] = {"index": row.index, "prompt_sha256": row.digest}
    if row.label is not None:
        found["id"] = row.label
    if conversation.error is not None:
        found["error"] = conversation.error
    if results:
        last = results[-1]
        found |= {
            "text": last.text,
            "answers": [result.text for result in results],
            "finish_reason": last.finish_reason.value,
            "prompt_tokens": last.prompt_tokens,
            "output_tokens": sum(len(result.tokens) for result in results),
            "stats": [result.stats.to_dict() for result in results],
        }
        if last.logprobs is not None:
            found["logprobs"] = [
                [{"token": e.token, "logprob": e.logprob, "top": e.top} for e in result.logprobs or ()]
                for result in results
            ]
    if answers is not None:
        answers.write(found)
    else:
        sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
        sys.stdout.flush()


def _check_length(engine: Engine, tokens: list[int]) -> None:
    """``Engine.run`` stops at a request it refuses; a prompt that is too long must not stop the other ones."""
    if not tokens or len(tokens) >= engine.model.context_length:
        raise UsageError(f"the prompt has {len(tokens)} tokens; allowed are 1 to {engine.model.context_length - 1}")


def _settings(run: FileRun, options: EngineOptions, params: SamplingParams) -> dict[str, object]:
    """What answers may depend on; the number of threads and the batch are the machine's business."""
    settings = {name: value for name, value in options.to_dict().items() if name != "threads"}
    return settings | params.model_dump(mode="json") | {"raw": run.raw}
