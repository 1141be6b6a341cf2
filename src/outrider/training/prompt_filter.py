"""Which prompts that the target wrote itself are fit for training, and how many each rule dropped.

Rules, in this order: the turn ended by itself, holds no special tokens, is printable text within the length bounds, is
not the repetition of a few words, is not close to an evaluation text, and not close to a prompt kept before. Texts are
compared as words (Unicode-normalised, without case and punctuation; every CJK character is a word). Knows no models.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import UsageError

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_LONG_RUN = 8
"""Words that two unrelated texts hardly share in a row."""
_SHORT_RUN = 5
"""A text of fewer words is close to another one only if they are equal."""
_SAME = 0.5
"""Share of a prompt's runs seen before from which it counts as a copy."""
_REPETITIVE = 0.3
"""Share of different words below which a text of ``_MANY`` words repeats itself."""
_MANY = 20


@dataclass(frozen=True, slots=True)
class Written:
    """One turn that the target wrote: its text, whether it ended by itself, whether special tokens are in it."""

    text: str
    is_finished: bool
    has_specials: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """What lengths are kept: words at least, characters at most."""

    min_words: int = 3
    max_characters: int = 1500


def words(text: str) -> tuple[str, ...]:
    """The words of a text as it is compared."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def runs(text: Sequence[str], length: int) -> set[tuple[str, ...]]:
    """Every run of ``length`` words."""
    return {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}


class ExcludedTexts:
    """Evaluation texts that no training prompt may be close to.

    A prompt is close when it equals one, shares a run of 8 words with one, or when the shorter of the two has 5 to 7
    words and lies inside the other one.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            if split := words(text):
                self._whole.add(split)
                for length in range(_SHORT_RUN, _LONG_RUN + 1):
                    self._runs |= runs(split, length)

    def is_close(self, text: Sequence[str]) -> bool:
        """Whether ``words`` of a prompt are close to an excluded text."""
        whole = tuple(text)
        if whole in self._whole or not self._runs.isdisjoint(runs(whole, _LONG_RUN)):
            return True
        if _SHORT_RUN <= len(whole) < _LONG_RUN and whole in self._runs:
            return True
        return any(not self._whole.isdisjoint(runs(whole, length)) for length in range(_SHORT_RUN, _LONG_RUN))


class PromptFilter:
    """Decides about one prompt after another; what it kept counts for those that follow.

    Args:
        excluded: evaluation texts.
        bounds: lengths kept.

    Attributes:
        dropped: prompts dropped by each rule.
    """

    def __init__(self, excluded: ExcludedTexts, bounds: Bounds | None = None) -> None:
        self._excluded, self._bounds = excluded, bounds or Bounds()
        self._whole: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        self.dropped: Counter[str] = Counter()

    def keep(self, turn: Written) -> str | None:
        """The prompt's text without outer blanks, or ``None`` when a rule drops it."""
        text = turn.text.strip()
        split = words(text)
        if reason := self._reason(turn, text, split):
            self.dropped[reason] += 1
            return None
        self._whole.add(split)
        self._runs |= runs(split, _LONG_RUN)
        return text

    def _reason(self, turn: Written, text: str, split: tuple[str, ...]) -> str | None:
        if not turn.is_finished:
            return "not finished"
        if turn.has_specials:
            return "special tokens"
        if not all(c.isprintable() or c in "\n\t" for c in text) or "\ufffd" in text:
            return "not printable"
        if len(split) < self._bounds.min_words:
            return "too short"
        if len(text) > self._bounds.max_characters:
            return "too long"
        if len(split) >= _MANY and len(set(split)) < _REPETITIVE * len(split):
            return "repetitive"
        if self._excluded.is_close(split):
            return "close to an evaluation text"
        mine = runs(split, _LONG_RUN)
        if split in self._whole or (mine and len(mine & self._runs) >= _SAME * len(mine)):
            return "near-duplicate"
        return None


def read_excluded(paths: Sequence[Path]) -> ExcludedTexts:
    """Every text of evaluation files (JSON lines): all strings of a row count, whatever their field is called.

    Raises:
        UsageError: a file that cannot be read, or a line that is not JSON.
    """
    return ExcludedTexts(text for path in paths for text in _texts(path))


def _texts(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the evaluation texts in {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield from _strings(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{path}, line {number} is not JSON: {error}") from None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
