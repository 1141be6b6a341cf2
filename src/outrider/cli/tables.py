"""Tables that fit 80 columns: statistics of one or several runs, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from outrider.engine.stats import Stats
    from outrider.schedules.sequence import TokenLogprob
    from outrider.text.tokenizer import Tokenizer

_DEPTHS = 5
"""Depths shown: more would not fit beside another run."""


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values[:_DEPTHS]) or "-"


_ROWS: tuple[tuple[str, Callable[[Stats], str]], ...] = (
    ("output law", lambda s: "LOSSY" if s.lossy else "the target's"),
    ("prompt tokens", lambda s: f"{s.prompt_tokens}"),
    ("output tokens", lambda s: f"{s.output_tokens}"),
    ("tokens per second (decoding)", lambda s: f"{s.tokens_per_second:.1f}"),
    ("mean acceptance length", lambda s: f"{s.mean_acceptance_length:.2f}"),
    ("guesses drafted", lambda s: f"{s.num_draft_tokens}"),
    ("guesses accepted", lambda s: f"{s.num_accepted_tokens}"),
    ("acceptance rate", lambda s: f"{100 * s.draft_acceptance_rate:.1f} %"),
    ("accepted to depth 1, 2, ...", lambda s: _shares(s.acceptance_per_pos)),
    ("  of those one shorter", lambda s: _shares(s.conditional_acceptance_per_pos)),
    ("seconds: prefill", lambda s: f"{s.prefill_seconds:.3f}"),
    ("seconds: draft", lambda s: f"{s.draft_seconds:.3f}"),
    ("seconds: target", lambda s: f"{s.target_seconds:.3f}"),
    ("seconds: verify", lambda s: f"{s.verify_seconds:.3f}"),
    ("seconds: other", lambda s: f"{s.other_seconds:.3f}"),
    ("seconds: decoding in all", lambda s: f"{s.decode_seconds:.3f}"),
)


def plain_table(*columns: str, right: Sequence[int] = ()) -> Table:
    """A borderless table; the columns in ``right`` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    return table


def stats_table(runs: Mapping[str, Stats]) -> Table:
    """One column a run, one line a figure."""
    table = plain_table("", *runs, right=range(1, len(runs) + 1))
    for label, read in _ROWS:
        table.add_row(label, *(read(stats) for stats in runs.values()))
    return table


def logprob_table(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> Table:
    """One line a token: its log-probability and the best tokens at its place."""
    table = plain_table("token", "logprob", "best", right=[1])
    for entry in logprobs:
        best = "  ".join(f"{_quoted(tokenizer, token)} {value:.3f}" for token, value in entry.top)
        table.add_row(_quoted(tokenizer, entry.token), f"{entry.logprob:.4f}", best)
    return table


def _quoted(tokenizer: Tokenizer, token: int) -> str:
    from rich.markup import escape

    return escape(repr(tokenizer.readable(token)))
