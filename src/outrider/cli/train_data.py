"""``outrider train collect``, ``prompts`` and ``export-answers``: the data that draft heads are trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.progress import counting_bar
from outrider.cli.train_table import duration
from outrider.errors import InvalidOptionError, UsageError

if TYPE_CHECKING:
    from outrider.training.collect import Progress

_ANSWERING, _KEEPING = "Answers", "What is kept"

_LINE_SECONDS = 60.0
"""Between two lines of a log."""

MaxTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", help="Tokens of an answer at most.", rich_help_panel=_ANSWERING)
]
DataSeed = Annotated[int, typer.Option(help="Of all samples; 0 to 2^29.", min=0, max=2**29 - 1)]
Batch = Annotated[int, typer.Option(help="Texts decoded together, 1 to 1024.", min=1, max=1024)]


def collect(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Prompts, as 'generate --file' takes them. (none with --answers)")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of feature files; a rerun goes on there.")] = (
        Path("features")
    ),
    answers: Annotated[
        Path | None,
        typer.Option(help="Take answers from this file of 'export-answers', generate nothing. (default: none)"),
    ] = None,
    model: o.Model = o.ENGINE.model,
    repeats: Annotated[int, typer.Option(help="Answers to each prompt, 1 to 1000.", rich_help_panel=_ANSWERING)] = 1,
    temperatures: Annotated[
        str, typer.Option(help="With commas; prompts get them in turn.", rich_help_panel=_ANSWERING)
    ] = "0,0.8",
    max_new_tokens: MaxTokens = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="Leave out longer prompts.", rich_help_panel=_ANSWERING)
    ] = 1024,
    seed: DataSeed = 0,
    batch: Batch = 32,
    features: Annotated[
        str, typer.Option(help="Hidden states, e.g. 2,15,27,final; auto is what the heads read.")
    ] = "auto",
    shard_mb: Annotated[int, typer.Option(help="Megabytes of one feature file at most, 1 to 64.")] = 64,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
) -> None:
    """Let the target answer prompts and keep its hidden states: what heads are trained on."""
    from outrider.training.collect import CollectOptions
    from outrider.training.collect import collect as run_collect
    from outrider.training.collect import replay as run_replay
    from outrider.training.prompt_data import read_prompt_files

    if bool(files) == (answers is not None):
        raise UsageError("give either files of prompts or --answers FILE")
    options = CollectOptions.parse(
        features=_features(features), repeats=repeats, temperatures=_numbers(temperatures),
        max_new_tokens=max_new_tokens, max_prompt_tokens=max_prompt_tokens, batch=batch, seed=seed,
        shard_megabytes=shard_mb,
    )  # fmt: skip
    rows = read_prompt_files(files or [])
    loaded = engine_factory.load_target(model, dtype, weights, device, threads)
    with _Reporter("answers") as reporter, _resumable(f"whole answers are in {output}"):
        if answers is None:
            done = run_collect(loaded, rows, options, output, reporter.progress)
        else:
            done = run_replay(loaded, answers, options, output, reporter.progress)
    typer.echo(f"{output}: {done.done} answers ({done.tokens} tokens new)")
    if done.skipped:
        typer.echo(f"left out: {done.skipped} answers whose prompt has more than {max_prompt_tokens} tokens", err=True)


def prompts(
    output: Annotated[Path, typer.Option("--output", "-o", help="File of prompts to write.")],
    count: Annotated[int, typer.Option(help="Turns that the model writes; fewer are kept.", min=1)] = 1000,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            "--exclude",
            help="Evaluation file (JSON lines) that no prompt may be close to; may be repeated.",
            rich_help_panel=_KEEPING,
        ),
    ] = None,
    min_words: Annotated[int, typer.Option(help="Words at least.", min=1, rich_help_panel=_KEEPING)] = 3,
    max_characters: Annotated[int, typer.Option(help="Characters at most.", min=1, rich_help_panel=_KEEPING)] = 1500,
    model: o.Model = o.ENGINE.model,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Drop turns that do not end within.", min=1)
    ] = 256,
    seed: DataSeed = 0,
    batch: Batch = 48,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
) -> None:
    """Let the target write user turns itself, as prompts to train on."""
    from outrider.training.prompt_filter import Bounds, read_excluded
    from outrider.training.self_prompts import SelfPromptOptions, write_prompts

    excluded = read_excluded(exclude or [])
    if not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output} is in no existing folder; make it, or choose another")
    loaded = engine_factory.load_target(model, dtype, weights, device, threads)
    options = SelfPromptOptions(count, seed, max_new_tokens, batch, Bounds(min_words, max_characters))
    with _Reporter("turns") as reporter, _resumable(f"turns so far are in {output}.turns"):
        written = write_prompts(loaded, options, excluded, output, reporter.count)
    typer.echo(f"{output}: {written.kept} prompts of {count} turns")
    for reason, number in sorted(written.dropped.items(), key=lambda item: -item[1]):
        typer.echo(f"dropped, {reason}: {number}")


def export_answers(
    folders: Annotated[list[Path], typer.Argument(help="Folders of 'train collect', of one target.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (.safetensors).")],
) -> None:
    """Write the answers of feature folders as token ids, small enough to commit; 'collect --answers' reads them."""
    from outrider.training.answer_tokens import export_answers as export

    count, tokens = export(folders, output)
    typer.echo(f"{output}: {count} answers, {tokens} tokens, {output.stat().st_size / 1e6:.2f} MB")


class _Reporter:
    """Texts done, tokens a second and the time left, on stderr: a bar in a terminal, a line a minute in a log."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        self._bar = counting_bar(console) if console.is_terminal else None
        self._what = what
        self._begun: tuple[float, int] | None = None
        """When the first report came, and what was done by then."""
        self._said = 0.0

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None and self._begun is not None:
            self._bar.stop()

    def count(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are there."""
        self._show(done, total, "")

    def progress(self, progress: Progress) -> None:
        """Show where a collecting run stands; the first time, how much room it may take too."""
        if self._begun is None:
            left = progress.total - progress.done
            room = progress.bytes_at_most / 1e6
            typer.echo(f"{left} answers to go; all features take {room:.2f} MB at most", err=True)
        seconds = 0.0 if self._begun is None else time.monotonic() - self._begun[0]
        speed = f"{progress.tokens / seconds:.0f} tokens/s" if seconds > 1.0 else ""
        self._show(progress.done, progress.total - progress.skipped, speed)

    def _show(self, done: int, total: int, speed: str) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._said = (now, done), now
            if self._bar is not None:
                self._bar.start()
                self._bar.add_task(self._what)
        begun, before = self._begun
        if self._bar is not None:
            description = f"{self._what} {speed}".rstrip()
            self._bar.update(self._bar.task_ids[0], description=description, completed=done, total=total)
        elif now - self._said >= _LINE_SECONDS and done > before:
            self._said = now
            left = duration((now - begun) / (done - before) * (total - done))
            parts = (f"{self._what} {done} of {total}", speed, f"{left} left")
            typer.echo(", ".join(part for part in parts if part), err=True)


@contextmanager
def _resumable(where: str) -> Iterator[None]:
    """Ctrl-C says where the finished work is; the interrupt goes on to the border, which exits with 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {where}; run the same command again to go on", err=True)
        raise


def _features(text: str) -> list[str | int] | None:
    if text == "auto":
        return None
    names = [name.strip() for name in text.split(",")]
    return [int(name) if name.isdecimal() else name for name in names]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidOptionError(f"--temperatures '{text}' is not numbers with commas, for example 0,0.8") from None
