"""Files of prompts: what a row may look like. Bad lines are all named, so that one look mends the file.

A row is JSON with one of ``prompt`` or ``text`` (a string), ``messages`` (a conversation) or ``turns`` (the user's
messages, answered one after the other, as Spec-Bench has them).
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.errors import UsageError

Message = Mapping[str, str]

MAX_NAMED = 20
"""Bad lines that an error names."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt: ``turns`` are strings to answer in order, or ``messages`` is a conversation to answer once.

    Attributes:
        index: of the row among the rows of its file.
        label: the row's own name, if it has one.
        line: where it stands in the file, from 1.
    """

    index: int
    turns: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    label: object = None
    line: int = 0

    @property
    def first(self) -> str | list[Message]:
        """What is answered first: the conversation, or the first turn."""
        return list(self.messages) if self.messages else self.turns[0]

    @property
    def digest(self) -> str:
        """Identifies the prompt's text, whatever else the row says."""
        text = json.dumps([self.turns, self.messages], ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def read_prompts(path: Path) -> list[PromptRow]:
    """Every row of ``path``; empty lines are skipped.

    Raises:
        UsageError: naming every line that is not a prompt (the first ``MAX_NAMED`` of them).
    """
    try:
        # Not splitlines: JSON strings may hold U+2028 and U+0085 as they are.
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read the prompts in {path}: {error}") from None
    rows: list[PromptRow] = []
    bad: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(replace(_parse(line), index=len(rows), line=number))
        except ValueError as error:
            bad.append(f"line {number} {error}")
    if bad:
        raise bad_lines(path, bad)
    if not rows:
        raise UsageError(f'{path} holds no prompts; write one JSON object a line, for example {{"prompt": "Hello"}}')
    return rows


def bad_lines(path: Path, bad: list[str]) -> UsageError:
    """The error that names ``bad`` lines, each as "line 3 is ...", and says what a row looks like."""
    named = "; ".join(bad[:MAX_NAMED])
    more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
    return UsageError(
        f'{path}, {named}{more}; give "prompt" or "text" (a string), "messages" (role and content) '
        'or "turns" (a list of strings)'
    )


def _parse(line: bytes) -> PromptRow:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(row, dict):
        label = row.get("id", row.get("question_id", row.get("task_id")))
        for key in ("prompt", "text"):
            if isinstance(value := row.get(key), str) and value.strip():
                return PromptRow(0, turns=(value,), label=label)
        messages = row.get("messages")
        if isinstance(messages, list) and _is_conversation(messages):
            return PromptRow(0, messages=tuple(messages), label=label)
        turns = row.get("turns")
        if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
            return PromptRow(0, turns=tuple(turns), label=label)
    raise ValueError("has no prompt")


def _is_conversation(value: list[object]) -> bool:
    return bool(value) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
