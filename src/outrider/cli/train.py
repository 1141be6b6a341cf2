"""``outrider train METHOD``: train a draft head on collected data; one command for each head, with the same options."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli import options as o
from outrider.cli import train_data
from outrider.cli.train_table import TrainTable, shown, top1
from outrider.errors import InvalidOptionError, RunError

if TYPE_CHECKING:
    from outrider.training.train_head import Trained

HEADS = {
    "eagle3": "Train an EAGLE-3 head: three hidden states, one layer, unrolled steps.",
    "eagle": "Train an EAGLE-1/2 head: one layer that predicts the next hidden state.",
    "mtp": "Train a multi-token-prediction head: one layer, used again for each step.",
    "medusa": "Train Medusa heads: one for each of the next tokens, all from one hidden state.",
    "hydra": "Train Hydra heads: like Medusa's, but each reads the guesses before it.",
    "layer_skip": "Train an early exit: a small layer behind some of the target's blocks.",
}
"""Command (with underscores as hyphens) -> its help."""

DEFAULT_TOKENS = "2M"

_DATA, _LENGTH, _LEARNING, _FILES = "Data", "Length", "Learning", "Files"
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}

Data = Annotated[
    list[Path], typer.Option(help="Folder of 'outrider train collect'; may be repeated.", rich_help_panel=_DATA)
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Head file to write.", rich_help_panel=_FILES)]
Validation = Annotated[
    float,
    typer.Option(help="Share of the requests kept for validation.", min=0.0, max=0.5, rich_help_panel=_DATA),
]
WholeText = Annotated[
    bool,
    typer.Option(
        "--whole-text/--answers",
        help="Learn from the prompts' text too, or only from what the target wrote.",
        rich_help_panel=_DATA,
    ),
]
Row = Annotated[
    int, typer.Option(help="Tokens of a packed row; of longer answers the last.", min=16, rich_help_panel=_DATA)
]
BatchTokens = Annotated[int, typer.Option(help="Tokens of one update.", min=16, rich_help_panel=_DATA)]
DraftVocab = Annotated[
    int, typer.Option(help="Tokens that the head can guess; 0 for all.", min=0, rich_help_panel=_LEARNING)
]
Steps = Annotated[
    int | None,
    typer.Option(help="Unrolled steps, or heads. (default: the method's)", min=1, max=16, rich_help_panel=_LEARNING),
]
Tokens = Annotated[
    str | None,
    typer.Option(help=f"Tokens to train on, e.g. 500k or 2M. (default: {DEFAULT_TOKENS})", rich_help_panel=_LENGTH),
]
Minutes = Annotated[
    float | None, typer.Option(help="Train this long instead. (default: by tokens)", rich_help_panel=_LENGTH)
]
LearningRate = Annotated[
    float, typer.Option("--lr", help="Learning rate at its peak.", min=0.0, max=1.0, rich_help_panel=_LEARNING)
]
Warmup = Annotated[
    float,
    typer.Option(help="Share of the training in which it rises.", min=0.0, max=0.9, rich_help_panel=_LEARNING),
]
WeightDecay = Annotated[float, typer.Option(help="AdamW's, of matrices.", min=0.0, rich_help_panel=_LEARNING)]
Clip = Annotated[float, typer.Option(help="Largest norm of the gradient.", min=1e-6, rich_help_panel=_LEARNING)]
TrainSeed = Annotated[
    int, typer.Option("--seed", help="Of the start, the order and the noise.", min=0, rich_help_panel=_LEARNING)
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="NAME=VALUE of the method's own options, e.g. loss=kl; may be repeated. (default: none)",
        rich_help_panel=_LEARNING,
    ),
]
KeepBest = Annotated[
    bool,
    typer.Option("--keep-best/--keep-last", help="End with the best validation's numbers.", rich_help_panel=_LEARNING),
]
Init = Annotated[
    Path | None, typer.Option(help="Head to go on from, as a new training. (default: none)", rich_help_panel=_FILES)
]
WorkDir = Annotated[
    Path | None, typer.Option(help="For checkpoints and curves. (default: OUTPUT.work)", rich_help_panel=_FILES)
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--restart", help="Go on from the work folder's checkpoint, or begin again.", rich_help_panel=_FILES
    ),
]
CheckpointMinutes = Annotated[float, typer.Option(help="Between two checkpoints.", min=0.0, rich_help_panel=_FILES)]
TrainDtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="Of products: float32, bfloat16 or auto. Parameters are float32.", rich_help_panel=_LEARNING
    ),
]

train_app = typer.Typer(help="Train draft heads and small models for a target.")


def register(app: typer.Typer) -> None:
    """Add the group of commands to ``app``."""
    collecting = "Example: outrider train collect prompts.jsonl --output features"
    train_app.command("collect", epilog=collecting)(train_data.collect)
    train_app.command("prompts", epilog="Example: outrider train prompts --output prompts.jsonl")(train_data.prompts)
    exporting = "Example: outrider train export-answers features --output answers.safetensors"
    train_app.command("export-answers", epilog=exporting)(train_data.export_answers)
    for method, text in HEADS.items():
        command = method.replace("_", "-")
        example = f"Example: outrider train {command} --data features --output {command}.safetensors --tokens 2M"
        train_app.command(command, help=text, epilog=example)(head)
    train_app.command("plot", epilog="Example: outrider train plot eagle3.curves.jsonl --output eagle3.png")(plot)
    app.add_typer(train_app, name="train")


def head(  # one line an option; the work is in training/train_head.py
    context: typer.Context,
    data: Data,
    output: Output,
    model: o.Model = o.ENGINE.model,
    tokens: Tokens = None,
    minutes: Minutes = None,
    validation: Validation = 0.02,
    whole_text: WholeText = False,
    row: Row = 512,
    batch_tokens: BatchTokens = 2048,
    draft_vocab: DraftVocab = 8192,
    steps: Steps = None,
    lr: LearningRate = 1e-3,
    warmup: Warmup = 0.05,
    weight_decay: WeightDecay = 0.01,
    clip: Clip = 1.0,
    seed: TrainSeed = 0,
    set_: Setting = None,
    keep_best: KeepBest = False,
    init: Init = None,
    work_dir: WorkDir = None,
    resume: Resume = True,
    checkpoint_minutes: CheckpointMinutes = 10.0,
    dtype: TrainDtype = "auto",
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
) -> None:
    from outrider.training.optimizer import OptimizerSettings
    from outrider.training.run_state import LoopSettings, Upkeep
    from outrider.training.train_head import HeadTraining, train_head, training_dtype

    set_threads(threads)
    loop = LoopSettings(
        **budget(tokens, minutes),
        batch_rows=rows_of(batch_tokens, row),
        seed=seed,
        dtype=training_dtype(checked_dtype(dtype), device),
        keep_best=keep_best,
        optimizer=OptimizerSettings(lr, warmup, weight_decay=weight_decay, clip=clip),
    )
    method = str(context.command.name).replace("-", "_")
    work = work_dir or output.with_name(output.name + ".work")
    with TrainTable(Console(stderr=True)) as table:
        upkeep = Upkeep(work, checkpoint_seconds=60.0 * checkpoint_minutes, report=table.show)
        asked = HeadTraining(
            method, model, data, output, loop, upkeep, draft_vocab, steps, row, validation, whole_text, device, dtype,
            init, not resume, named_values(set_ or []), command_line(),
        )  # fmt: skip
        with interruptible(table, work, resume):
            trained = train_head(asked, table.note)
    _tell(trained, method)


@contextmanager
def interruptible(table: TrainTable, work: Path, resume: bool) -> Iterator[None]:
    """Ctrl-C says how to go on; the interrupt itself goes on to the border, which exits with 130."""
    from outrider.training.checkpoint import checkpoint_paths

    try:
        yield
    except KeyboardInterrupt:
        if checkpoint_paths(work):
            command = "the same command" if resume else "the same command without --restart"
            table.note(f"interrupted; {command} goes on from the checkpoint in {work}")
        raise


def _tell(trained: Trained, method: str) -> None:
    from outrider.training.curves import draw_curves

    figures, card = trained.progress.validation, trained.card
    errors = Console(stderr=True, highlight=False)
    picture = trained.path.with_suffix(".png")
    try:
        draw_curves(trained.progress.curves, picture, f"{method}: {trained.path.name}")
    except RunError as error:
        errors.print(f"{error}; later: outrider train plot {trained.curves}", markup=False, soft_wrap=True)
    typer.echo(f"{trained.path}: {card['tokens']} tokens, {card['epochs']} epochs, {card['hours']} hours")
    if figures is not None:
        typer.echo(f"validation: top-1 {top1(figures)}, simulated acceptance length {shown(figures.acceptance)}")
    errors.print(
        f"use it with: --model {card['target']} --drafter {method}:head={trained.path}", markup=False, soft_wrap=True
    )


def plot(
    curves: Annotated[Path, typer.Argument(help="Curve file of a training (JSON lines).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file to write.")] = Path("curves.png"),
) -> None:
    """Draw a training's curves: loss, top-1 of each step, simulated acceptance length."""
    from outrider.training.curves import draw_curves, read_curves

    draw_curves(read_curves(curves), output, curves.name)
    typer.echo(f"written to {output}")


def count_of(text: str) -> int:
    """``500k``, ``2M``, ``1.5m``, ``2000000`` -> a number.

    Raises:
        InvalidOptionError: for anything else, or less than 1.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip().replace("_", ""))
    number = 0 if found is None else round(float(found[1]) * _UNITS[found[2].lower()])
    if number < 1:
        raise InvalidOptionError(f"--tokens {text} is not a number of tokens; give for example 500k or 2M")
    return number


def budget(tokens: str | None, minutes: float | None) -> dict[str, Any]:
    """Tokens or seconds of a ``LoopSettings``.

    Raises:
        InvalidOptionError: when both are given, or minutes are not above 0.
    """
    if minutes is None:
        return {"tokens": count_of(tokens or DEFAULT_TOKENS), "seconds": None}
    if tokens is not None:
        raise InvalidOptionError("--tokens and --minutes are two ways to say how long; give one of them")
    if not 0.0 < minutes < float("inf"):
        raise InvalidOptionError(f"--minutes {minutes} is not allowed: it must be above 0")
    return {"tokens": None, "seconds": 60.0 * minutes}


def rows_of(batch_tokens: int, row: int) -> int:
    """Packed rows of a batch.

    Raises:
        InvalidOptionError: when not even one fits.
    """
    if batch_tokens < row:
        raise InvalidOptionError(
            f"--batch-tokens {batch_tokens} is less than one row of {row}; raise it or lower --row"
        )
    return batch_tokens // row


def named_values(items: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping.

    Raises:
        InvalidOptionError: for a text without an equals sign, or a name given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or name.strip() in found:
            raise InvalidOptionError(f"--set {item} is not of the form NAME=VALUE, or names an option again")
        found[name.strip()] = value.strip()
    return found


def checked_dtype(name: str) -> str:
    """A dtype of training.

    Raises:
        InvalidOptionError: for another one.
    """
    if name not in ("auto", "float32", "bfloat16"):
        raise InvalidOptionError(f"--dtype {name} is not for training; give float32, bfloat16 or auto")
    return name


def set_threads(threads: int | None) -> None:
    """Compute threads of this process.

    Raises:
        InvalidOptionError: below 1.
    """
    if threads is None:
        return
    if threads < 1:
        raise InvalidOptionError(f"--threads {threads} is not allowed: it must be at least 1")
    import torch

    torch.set_num_threads(threads)


def command_line() -> str:
    """How this process was called, for a card."""
    return shlex.join(["outrider", *sys.argv[1:]])
