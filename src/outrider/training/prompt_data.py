"""Prompt files -> the requests of a collecting run.

Each turn of a conversation is a request of its own: everything before it, rendered by the chat template with the
generation prompt, is its prompt, and what the target then generates is its answer, the only part that is supervised.
``messages`` are answered once (assistant messages in them are prompt; one at the end is left out, the target writes its
own); ``turns`` are answered in order in one growing conversation, each behind the target's own earlier answers.
Knows nothing of models and of feature files.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import OutriderError, UsageError
from outrider.text.prompt_file import MAX_NAMED, Message, PromptRow, read_prompts
from outrider.text.tokenizer import Tokenizer
from outrider.training.generate import Answer, Request


def read_prompt_files(paths: Sequence[Path]) -> list[PromptRow]:
    """The rows of all files, in order, ready to be answered.

    Raises:
        UsageError: naming every bad line of every file (the first 20 of each).
    """
    rows: list[PromptRow] = []
    problems: list[str] = []
    for path in paths:
        try:
            found = [_answerable(row) for row in read_prompts(path)]
            if empty := [row.line for row in found if not row.turns and not row.messages]:
                named = ", ".join(map(str, empty[:MAX_NAMED]))
                problems.append(f"{path}, line {named} holds nothing to answer: assistant messages only")
            rows += found
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems))
    return rows


def _answerable(row: PromptRow) -> PromptRow:
    messages = list(row.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return replace(row, messages=tuple(messages))


def digest(rows: Sequence[PromptRow]) -> str:
    """Identifies the prompts and their order, whatever else their files say."""
    return hashlib.sha256("".join(row.digest for row in rows).encode()).hexdigest()


def turn_count(row: PromptRow) -> int:
    """Answers that one pass over the row gives."""
    return max(1, len(row.turns))


class PromptEncoder:
    """Conversations -> token ids, through the chat template where the model has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def check(self, rows: Sequence[PromptRow]) -> None:
        """Render every row once.

        Raises:
            UsageError: naming the rows (by line) that the template, or a model without one, cannot take.
        """
        bad: list[str] = []
        for row in rows:
            try:
                self.encode(row, [""] * (turn_count(row) - 1))
            except OutriderError as error:
                bad.append(f"line {row.line}: {error}")
        if bad:
            more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
            raise UsageError(f"prompts that cannot be answered: {'; '.join(bad[:MAX_NAMED])}{more}")

    def encode(self, row: PromptRow, answers: Sequence[str]) -> list[int]:
        """Prompt ids of the turn behind ``answers``.

        Raises:
            UsageError: when the conversation cannot be written for this model.
        """
        messages: list[Message] = list(row.messages)
        for turn, answer in zip(row.turns, answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        if row.turns:
            messages.append({"role": "user", "content": row.turns[len(answers)]})
        if self.tokenizer.chat_template is None and len(messages) == 1 and messages[0]["role"] == "user":
            ids = self.tokenizer.encode(messages[0]["content"])
        else:
            ids = self.tokenizer.apply_chat_template(messages)
        if not ids:
            raise UsageError("the prompt has no tokens")
        return ids

    def answer_text(self, tokens: Sequence[int]) -> str:
        """An answer as the next turn's template receives it."""
        return self.tokenizer.decode(tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each row is answered, and how.

    Attributes:
        repeats: passes over all rows.
        temperatures: row r of pass p gets number (r + p) of them, in turn.
        seed: of all samples, below 2^31; a request's own seed follows from it and its index.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: of one answer.
    """

    repeats: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.8)
    seed: int = 0
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256

    def temperature(self, row: int, repeat: int) -> float:
        """Of a row in one pass."""
        return self.temperatures[(row + repeat) % len(self.temperatures)]

    def is_wanted(self, row: int, repeat: int) -> bool:
        """Whether the pass answers the row: a second answer at temperature 0 would be the same."""
        earlier = (self.temperature(row, before) for before in range(repeat))
        return self.temperature(row, repeat) > 0.0 or all(temperature > 0.0 for temperature in earlier)


@dataclass(slots=True, eq=False)
class _Conversation:
    row: PromptRow
    number: int
    repeat: int
    first_index: int
    answers: list[str]


class RequestQueue:
    """The requests that are left, for ``answer_all``; an answer brings the conversation's next turn.

    It may run empty and be filled again while answers come in.

    Args:
        rows: of all prompt files.
        encoder: of the target's tokenizer.
        plan: passes, temperatures, limits.
        done: answers that exist by request index: the answer's ids where a later turn needs them, else anything.

    Attributes:
        skipped: answers left out, because the prompt (or the conversation before it) is too long.
        total: answers of the whole run, those left out included.
    """

    def __init__(
        self, rows: Sequence[PromptRow], encoder: PromptEncoder, plan: Plan, done: Mapping[int, Sequence[int]]
    ) -> None:
        self._encoder, self._plan, self._done = encoder, plan, done
        self._running: dict[int, _Conversation] = {}
        self._ready: deque[_Conversation] = deque()
        self._fresh = self._conversations(rows)
        self.skipped = 0
        self.total = sum(turn_count(conversation.row) for conversation in self._conversations(rows))

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        while True:
            conversation = self._ready.popleft() if self._ready else next(self._fresh)
            if (request := self._next_turn(conversation)) is not None:
                return request

    def answered(self, answer: Answer) -> None:
        """Take an answer of one of the requests; the conversation's next turn goes before new ones."""
        conversation = self._running.pop(answer.request.index)
        if turn_count(conversation.row) > len(conversation.answers) + 1:
            conversation.answers.append(self._encoder.answer_text(answer.tokens[len(answer.request.prompt) :]))
            self._ready.append(conversation)

    def _conversations(self, rows: Sequence[PromptRow]) -> Iterator[_Conversation]:
        index = 0
        for repeat in range(self._plan.repeats):
            for number, row in enumerate(rows):
                if self._plan.is_wanted(number, repeat):
                    yield _Conversation(row, number, repeat, index, [])
                index += turn_count(row)

    def _next_turn(self, conversation: _Conversation) -> Request | None:
        """The first turn that has no answer yet; nothing when there is none, or it does not fit."""
        answers, turns = conversation.answers, turn_count(conversation.row)
        while (index := conversation.first_index + len(answers)) in self._done:
            if len(answers) + 1 == turns:
                return None
            answers.append(self._encoder.answer_text(self._done[index]))
        prompt = self._encoder.encode(conversation.row, answers)
        if len(prompt) > self._plan.max_prompt_tokens:
            self.skipped += turns - len(answers)
            return None
        self._running[index] = conversation
        temperature = self._plan.temperature(conversation.number, conversation.repeat)
        return Request(index, prompt, temperature, (self._plan.seed << 32) + index)


def tokens_at_most(rows: Sequence[PromptRow], encoder: PromptEncoder, plan: Plan) -> tuple[int, int]:
    """Tokens of one answer after the other when none ends by itself, over all passes, and prompts that are too long."""
    total, too_long = 0, 0
    for number, row in enumerate(rows):
        passes = sum(plan.is_wanted(number, repeat) for repeat in range(plan.repeats))
        for turn in range(turn_count(row)):
            shortest = len(encoder.encode(row, [""] * turn))
            if shortest > plan.max_prompt_tokens:
                too_long += passes * (turn_count(row) - turn)
                break
            longest = min(shortest + turn * plan.max_new_tokens, plan.max_prompt_tokens)
            total += passes * (longest + plan.max_new_tokens)
    return total, too_long
