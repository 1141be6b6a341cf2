"""``outrider methods``: every registered part, its source and for what it is exact."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cli.tables import plain_table


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("methods", epilog="Example: outrider methods --json")(methods)


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. (default: a table)")] = False,
) -> None:
    """List drafters, shapes, verifiers and schedules."""
    from outrider.engine import registry

    found = registry.methods()
    if as_json:
        typer.echo(json.dumps([asdict(method) for method in found]))
        return
    table = plain_table("axis", "name", "what it does")
    for method in found:
        lines = [method.summary, f"source: {method.source}", f"law: {method.exactness}"]
        if method.options:
            lines.append(f"options: {method.options}")
        table.add_row(method.axis, f"[bold]{escape(method.name)}[/]", escape("\n".join(lines)))
    Console().print(table)
