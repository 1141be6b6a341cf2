"""``outrider datastore build``: text files -> a store for ``--drafter datastore:FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from outrider.cli import options as o

MAX_TOKENS = 10_000_000

datastore_app = typer.Typer(help="Texts to guess from, for --drafter datastore.")


def register(app: typer.Typer) -> None:
    """Add the group of commands to ``app``."""
    app.add_typer(datastore_app, name="datastore", epilog="Example: outrider datastore build notes.txt -o my.store")


@datastore_app.callback()
def _group() -> None:
    """Texts to guess from, for --drafter datastore."""


@datastore_app.command("build", epilog="Example: outrider datastore build notes/*.txt --output my.store")
def build(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files, one document each.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, or a directory that exists.")],
    model: o.Model = o.ENGINE.model,
    max_tokens: Annotated[
        int, typer.Option(help="Leave out what comes after this many tokens.", min=1, max=1_000_000_000)
    ] = MAX_TOKENS,
) -> None:
    """Make a datastore of text files with a model's tokenizer (building takes about 50 bytes of memory a token)."""
    from outrider.engine.datastore import build_datastore

    with _BuildProgress() as progress:
        built = build_datastore(files, model, output, max_tokens, progress.report)
    typer.echo(f"{built.path}: {built.documents} documents, {built.tokens} tokens")
    errors = Console(stderr=True, highlight=False)
    if built.is_cut:
        errors.print(f"the files hold more than {max_tokens} tokens; raise --max-tokens to keep the rest", markup=False)
    errors.print(f"use it with: --model {model} --drafter datastore:{built.path}", markup=False, soft_wrap=True)


class _BuildProgress:
    """One bar a stage on stderr."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _BuildProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` of ``stage`` are through."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)
