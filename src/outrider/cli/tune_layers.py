"""``outrider tune layers``: search the sublayers that ``--drafter layer_skip`` leaves out of a model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.tables import plain_table
from outrider.errors import InvalidOptionError
from outrider.text.prompt_file import read_prompts

if TYPE_CHECKING:
    from outrider.drafters.layer_subsets import LayerSubset
    from outrider.engine.engine import Prompt
    from outrider.engine.layer_search import Candidate
    from outrider.engine.layer_tuning import LayerTuning, TunedLayers

_SEARCH = "Search"


def register(group: typer.Typer) -> None:
    """Add the command to ``group``."""
    group.command("layers", epilog="Example: outrider tune layers --max-seconds 300")(layers)


def layers(  # one line an option; the work is in engine/layer_tuning.py
    model: o.Model = o.ENGINE.model,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
    max_seconds: Annotated[
        float, typer.Option(help="Seconds the search may take, above 0.", rich_help_panel=_SEARCH)
    ] = 600.0,
    skip_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the sublayers to leave out, between 0 and 1. (default: what is fastest)",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    moves: Annotated[
        int, typer.Option(help="Random moves after the elimination, from 0.", rich_help_panel=_SEARCH)
    ] = 100,
    search_seed: Annotated[int, typer.Option(help="Seed of the random moves.", rich_help_panel=_SEARCH)] = 0,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "-n", help="Tokens of each answer searched on, from 2.", rich_help_panel=_SEARCH
        ),
    ] = 48,
    file: Annotated[
        Path | None,
        typer.Option(help="Prompts, as 'generate --file' takes them. (default: 8 built in)", rich_help_panel=_SEARCH),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. (default: a table)")] = False,
) -> None:
    """Search the sublayers that a model best leaves out when it drafts for itself, and keep them for layer_skip.

    Ctrl-C ends the search and keeps the best so far.
    """
    from outrider.drafters.layer_subsets import find_subset, save_subset
    from outrider.engine.acceptance import PROMPTS
    from outrider.engine.layer_tuning import LayerTuning, tune_layers

    tuning = LayerTuning(skip_share, max_new_tokens, moves, search_seed, max_seconds)
    _check(tuning)
    prompts: list[Prompt] = list(PROMPTS) if file is None else [row.first for row in read_prompts(file)]
    options = o.EngineOptions(model, "none", dtype=dtype, weights=weights, device=device, threads=threads)
    engine = engine_factory.load_engine(options)
    with SearchProgress(engine.model.num_layers) as progress:
        tuned = tune_layers(
            engine, prompts, tuning, _command(options, tuning, file), progress.report, progress.begin_stage
        )
    before = find_subset(engine.model)
    path = save_subset(engine.model, tuned.subset)
    _show(tuned, engine.model.num_layers, path, as_json)
    if path is not None and not as_json:
        warn(tuned.subset, before, path)


def _check(tuning: LayerTuning) -> None:
    if tuning.max_seconds <= 0:
        raise InvalidOptionError(f"--max-seconds {tuning.max_seconds:g} is not allowed: it must be above 0")
    if tuning.skip_share is not None and not 0 < tuning.skip_share < 1:
        raise InvalidOptionError(f"--skip-share {tuning.skip_share:g} is not allowed: it must be between 0 and 1")
    if tuning.moves < 0:
        raise InvalidOptionError(f"--moves {tuning.moves} is not allowed: it must be at least 0")
    if tuning.max_tokens < 2:
        raise InvalidOptionError(f"--max-new-tokens {tuning.max_tokens} is not allowed: it must be at least 2")


class SearchProgress:
    """A bar on stderr: subsets tried, time left at most, and the best so far."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left at most"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("text", total=None)

    def __enter__(self) -> SearchProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin_stage(self, stage: str) -> None:
        """Name what runs now."""
        self._bar.update(self._task, description=stage)

    def report(self, done: int, total: int, best: Candidate) -> None:
        """Show that ``done`` of at most ``total`` subsets were tried."""
        text = f"{len(best.skip)} of {2 * self._num_layers} left out, matchness {best.matchness:.2f}"
        self._bar.update(self._task, completed=done, total=total, description=text)


def _show(tuned: TunedLayers, num_layers: int, path: Path | None, as_json: bool) -> None:
    from outrider.drafters.layer_subsets import format_skip

    subset, search = tuned.subset, tuned.search
    if as_json:
        sizes = {
            size: {"skip": format_skip(found.skip), "matchness": found.matchness, "speedup": found.speedup}
            for size, found in search.by_size.items()
        }
        found = subset.model_dump() | {"stopped": search.stopped, "by_size": sizes}
        typer.echo(json.dumps(found | {"file": None if path is None else str(path)}))
        return
    console = Console(highlight=False)
    table = plain_table("left out", "matchness", "best chain", "expected speed", right=[0, 1, 2, 3])
    for size, candidate in search.by_size.items():
        mark = " *" if size == len(search.best.skip) else ""
        table.add_row(f"{size}{mark}", f"{candidate.matchness:.3f}", str(candidate.chain), f"{candidate.speedup:.2f}x")
    console.print(table)
    ended = f" ({search.stopped})" if search.stopped else ""
    console.print(
        f"{search.evaluations} subsets tried on {subset.tokens} tokens{ended}; the best leaves out "
        f"{len(search.best.skip)} of {2 * num_layers} sublayers: {subset.skip}",
        f"matchness {subset.matchness:.3f}, on text not searched on {subset.held_out:.3f}; expected speed "
        f"{subset.speedup:.2f}x with --shape chain:{subset.chain}",
        "not stored: this model has no weights to know it by"
        if path is None
        else f"stored in {path}; --drafter layer_skip uses it now",
        sep="\n",
        markup=False,
        soft_wrap=True,
    )


def warn(subset: LayerSubset, before: LayerSubset | None, path: Path) -> None:
    """What the user should know before he relies on the new subset."""
    if subset.speedup < 1.0:
        typer.echo("expected to be slower than plain decoding: the controller will mostly turn it off", err=True)
    if before is not None and before.skip != subset.skip:
        typer.echo(
            f"it takes the place of {before.skip} (matchness {before.matchness:.3f}, "
            f"expected speed {before.speedup:.2f}x); "
            f"delete {path} to have the subset that ships with Outrider, if there is one",
            err=True,
        )


def _command(options: o.EngineOptions, tuning: LayerTuning, file: Path | None) -> str:
    """The command line that searches the same again."""
    words = ["outrider", "tune", "layers", "--model", options.model]
    optional = {
        "--dtype": None if options.dtype == o.ENGINE.dtype else options.dtype,
        "--weights": None if options.weights == o.ENGINE.weights else options.weights,
        "--device": None if options.device == o.ENGINE.device else options.device,
        "--threads": options.threads,
        "--skip-share": tuning.skip_share,
        "--max-seconds": f"{tuning.max_seconds:g}",
        "--moves": tuning.moves,
        "--search-seed": tuning.seed,
        "--max-new-tokens": tuning.max_tokens,
        "--file": file,
    }
    for name, value in optional.items():
        words += [] if value is None else [name, str(value)]
    return shlex.join(words)
