"""``outrider doctor``: what this machine offers, and what is set up in a way that costs speed."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cli.tables import plain_table


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor", epilog="Example: outrider doctor --json")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. (default: a table)")] = False,
) -> None:
    """Look at processor, memory, torch and the model cache; takes a few seconds."""
    from outrider.cli.machine import inspect_machine

    facts = inspect_machine()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = plain_table("", "")
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(name, escape(text or "none"))
    Console(highlight=False).print(table)
