"""``outrider models`` and ``outrider pull``: what can be fetched by name, and fetching it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli.engine_factory import FetchProgress
from outrider.cli.tables import plain_table

if TYPE_CHECKING:
    from outrider.models.shipped import ShippedModel

MEGABYTE = 10**6


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("models", epilog="Example: outrider models")(models)
    app.command("pull", epilog="Example: outrider pull smollm2-135m")(pull)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. (default: a table)")] = False,
) -> None:
    """List the models that can be named: fetched when used, or in the package. Paths and hub ids work too."""
    from outrider.models import store
    from outrider.models.shipped import shipped_models

    rows: list[tuple[store.StoredModel | ShippedModel, Path | None]] = [
        *((model, store.cached_path(name)) for name, model in store.catalogue().items()),
        *((model, model.directory) for model in shipped_models().values()),
    ]
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
        is_shipped = not isinstance(model, store.StoredModel)
        fetched = "in the package" if is_shipped else "no" if path is None else "yes"
        table.add_row(model.name, size, fetched, model.license, model.description)
    Console().print(table)


def pull(
    name: Annotated[str, typer.Argument(help="A name that 'outrider models' lists.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is there.")] = False,
) -> None:
    """Fetch a model into the cache directory (OUTRIDER_CACHE) and print its path."""
    from outrider.models import store
    from outrider.models.shipped import shipped_models

    if (shipped := shipped_models().get(name)) is not None:
        typer.echo(str(shipped.directory))  # nothing to fetch
        return

    with FetchProgress() as progress:
        path = store.pull(name, progress.report, force=force)
    typer.echo(str(path))
