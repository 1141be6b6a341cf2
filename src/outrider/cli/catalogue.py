"""``outrider models`` and ``outrider pull``: what can be fetched by name, and fetching it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.engine_factory import FetchProgress
from outrider.cli.tables import plain_table

MEGABYTE = 10**6


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("models", epilog="Example: outrider models")(models)
    app.command("pull", epilog="Example: outrider pull smollm2-135m")(pull)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. (default: a table)")] = False,
) -> None:
    """List the models that can be fetched by name. Directories, .gguf files and hub ids work too."""
    from outrider.models import store

    rows = [(model, store.cached_path(name)) for name, model in store.catalogue().items()]
    if as_json:
        found = [
            {"name": m.name, "description": m.description, "license": m.license, "bytes": m.bytes,
             "path": None if path is None else str(path)}
            for m, path in rows
        ]  # fmt: skip
        typer.echo(json.dumps(found))
        return
    table = plain_table("name", "MB", "fetched", "license", "what it is", right=[1])
    for model, path in rows:
        size = f"{model.bytes / MEGABYTE:.0f}"
        table.add_row(model.name, size, "no" if path is None else "yes", model.license, model.description)
    Console().print(table)


def pull(
    name: Annotated[str, typer.Argument(help="A name that 'outrider models' lists.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is there.")] = False,
) -> None:
    """Fetch a model into the cache directory (OUTRIDER_CACHE) and print its path."""
    from outrider.models import store

    with FetchProgress() as progress:
        path = store.pull(name, progress.report, force=force)
    typer.echo(str(path))
