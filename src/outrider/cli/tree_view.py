"""Draws one step's tree of guesses: what was accepted, what was not, and who proposed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.tree import Tree

from outrider.types import StepRecord

if TYPE_CHECKING:
    from outrider.text.tokenizer import Tokenizer

ACCEPTED, REJECTED = "+", "-"  # readable without colour


def step_tree(record: StepRecord, step: int, tokenizer: Tokenizer) -> Tree:
    """The tree of ``record``; accepted nodes are marked ``+`` (bold green), other ones ``-`` (dim).

    Token text is quoted and escaped: it cannot change the terminal or the markup.
    """
    emitted = " ".join(quoted(tokenizer, token) for token in record.emitted)
    root_text = f" after {quoted(tokenizer, record.tokens[0])}" if record.tokens else ""
    counts = f"{record.accepted} of {record.drafted} guesses accepted"
    root = Tree(f"step {step} ({record.phase}){root_text}: {counts}, kept {emitted}")
    accepted = set(record.accepted_path)
    branches = {0: root}
    for node in range(1, len(record.tokens)):
        is_accepted = node in accepted
        mark, style = (ACCEPTED, "bold green") if is_accepted else (REJECTED, "dim")
        source = f"  [{record.sources[node]}]" if node < len(record.sources) and record.sources[node] else ""
        label = f"[{style}]{mark} {quoted(tokenizer, record.tokens[node])}{escape(source)}[/]"
        branches[node] = branches[record.parents[node]].add(label)
    return root


def quoted(tokenizer: Tokenizer, token: int) -> str:
    """The token's text as a Python string, safe inside rich markup."""
    return escape(repr(tokenizer.readable(token)))
