"""Where a step is cut: token by token, the earliest event wins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.schedules.stopping import StopRules
from outrider.types import FinishReason


class Matcher:
    """A stop string of which token 7 is the last one."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def push(self, tokens: Sequence[int]) -> int | None:
        self.seen += tokens
        return tokens.index(7) + 1 if 7 in tokens else None


def rules(max_tokens: int = 10, min_tokens: int = 0, matcher: Matcher | None = None) -> StopRules:
    return StopRules(frozenset({0}), min_tokens, max_tokens, FinishReason.CONTEXT, matcher)


@pytest.mark.parametrize(
    ("already", "tokens", "expected"),
    [
        (0, [1, 2, 3], (3, None)),
        (0, [1, 0, 3], (2, FinishReason.STOP_TOKEN)),
        (0, [1, 7, 0], (2, FinishReason.STOP_STRING)),
        (0, [0, 7], (1, FinishReason.STOP_TOKEN)),
        (8, [1, 2, 3], (2, FinishReason.CONTEXT)),
        (8, [1, 0, 3], (2, FinishReason.STOP_TOKEN)),
        (8, [1, 7, 3], (2, FinishReason.STOP_STRING)),
        (9, [1], (1, FinishReason.CONTEXT)),
        (0, [], (0, None)),
    ],
)
def test_earliest_event(already: int, tokens: list[int], expected: tuple[int, FinishReason | None]) -> None:
    assert rules(matcher=Matcher()).keep(already, tokens) == expected


def test_nothing_stops_before_min_tokens_but_the_limit() -> None:
    matcher = Matcher()
    early = rules(min_tokens=4, matcher=matcher)
    assert early.keep(0, [7, 0, 1]) == (3, None)
    assert matcher.seen == [7, 0, 1]
    assert early.keep(3, [0, 1]) == (1, FinishReason.STOP_TOKEN)
    assert rules(max_tokens=2, min_tokens=4).keep(0, [0, 0, 0]) == (2, FinishReason.CONTEXT)


def test_the_matcher_never_sees_a_token_that_is_not_kept() -> None:
    """Its state would hold text that the answer does not have."""
    matcher = Matcher()
    rules(matcher=matcher).keep(0, [1, 7, 5, 6])
    assert matcher.seen == [1, 7]
