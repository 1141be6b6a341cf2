"""Where a sequence ends: the earliest of stop token, stop string, length and context limit wins, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.types import FinishReason


class StopMatcher(Protocol):
    """Finds stop strings in a growing token sequence (``text/stop.py``)."""

    def push(self, tokens: Sequence[int]) -> int | None:
        """How many of ``tokens`` complete the earliest stop string, or ``None``."""
        ...


@dataclass(slots=True)
class StopRules:
    """One request's rules.

    Attributes:
        stop_ids: tokens that end the sequence (they are kept as its last token).
        min_tokens: stop tokens and strings before this many output tokens don't count.
        max_tokens: output tokens at most, context limit included.
        limit_reason: what reaching ``max_tokens`` means.
        matcher: stop strings, or ``None``.
    """

    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    limit_reason: FinishReason
    matcher: StopMatcher | None = None

    def keep(self, already: int, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of ``tokens`` may follow ``already`` output tokens, and why the sequence ends there, if it does."""
        for count, token in enumerate(tokens, start=1):
            total = already + count
            hits_string = self.matcher is not None and self.matcher.push([token]) is not None
            if total >= self.min_tokens:
                if token in self.stop_ids:
                    return count, FinishReason.STOP_TOKEN
                if hits_string:
                    return count, FinishReason.STOP_STRING
            if total >= self.max_tokens:
                return count, self.limit_reason
        return len(tokens), None
