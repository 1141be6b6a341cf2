"""``outrider train small-model`` and ``outrider train medusa2``: trainings that end in a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli import options as o
from outrider.cli import train as t
from outrider.cli.train_table import TrainTable, shown, top1
from outrider.errors import InvalidOptionError, RunError

if TYPE_CHECKING:
    from outrider.training.train_model import ModelTraining, TrainedModel

_SHAPE, _BOOSTING, _BACKBONE = "Shape", "Boosting", "Backbone"

Directory = Annotated[Path, typer.Option("--output", "-o", help="Model directory to write.", rich_help_panel="Files")]
Vocabulary = Annotated[
    int,
    typer.Option(help="Most frequent tokens that the loss looks at; 0 for all.", min=0, rich_help_panel="Learning"),
]
Hidden = Annotated[int, typer.Option(help="Width.", min=4, max=4096, rich_help_panel=_SHAPE)]
Layers = Annotated[int, typer.Option(help="Blocks.", min=1, max=64, rich_help_panel=_SHAPE)]
Heads = Annotated[int, typer.Option(help="Attention heads, of width/heads each.", min=1, rich_help_panel=_SHAPE)]
Intermediate = Annotated[int, typer.Option(help="Width inside the MLP.", min=4, rich_help_panel=_SHAPE)]
Context = Annotated[
    int,
    typer.Option(help="Positions; behind them drafting goes on in a window.", min=16, rich_help_panel=_SHAPE),
]
Negatives = Annotated[
    int, typer.Option(help="Rarer tokens drawn as negatives for each batch.", min=0, rich_help_panel="Learning")
]
BoostAgainst = Annotated[
    str | None,
    typer.Option(
        help="Earlier small models, with commas: learn from the answers that they miss. (default: none)",
        rich_help_panel=_BOOSTING,
    ),
]
BoostWeight = Annotated[
    int,
    typer.Option(
        help="0: the missed half of the answers only; from 2: all, the missed ones this often.",
        min=0,
        max=100,
        rich_help_panel=_BOOSTING,
    ),
]
InitModel = Annotated[
    str | None,
    typer.Option(
        "--init", help="Small model to go on from, as a new training. (default: none)", rich_help_panel="Files"
    ),
]
MedusaHeads = Annotated[int, typer.Option("--heads", help="Medusa heads.", min=1, max=16, rich_help_panel=_SHAPE)]
Rank = Annotated[int, typer.Option(help="Of the low-rank adapters.", min=1, max=1024, rich_help_panel=_BACKBONE)]
Alpha = Annotated[float, typer.Option(help="Adapters are scaled by alpha/rank.", min=0.0, rich_help_panel=_BACKBONE)]
HeadsWeight = Annotated[float, typer.Option(help="Of the heads' loss.", min=0.0, rich_help_panel=_BACKBONE)]
HeadRate = Annotated[
    float, typer.Option(help="Learning rate of the heads, times the backbone's.", min=0.0, rich_help_panel=_BACKBONE)
]


def register(app: typer.Typer) -> None:
    """Add the two commands to the group ``train``."""
    example = "Example: outrider train small-model --data features --output draft-1 --tokens 20M"
    app.command("small-model", epilog=example)(small_model)
    app.command("medusa2", epilog="Example: outrider train medusa2 --data features --output my-model")(medusa2)


def small_model(  # one line an option; the work is in training/train_model.py
    data: t.Data,
    output: Directory,
    model: o.Model = o.ENGINE.model,
    tokens: t.Tokens = None,
    minutes: t.Minutes = None,
    validation: t.Validation = 0.02,
    row: t.Row = 512,
    batch_tokens: t.BatchTokens = 2048,
    hidden: Hidden = 192,
    layers: Layers = 2,
    heads: Heads = 3,
    intermediate: Intermediate = 512,
    context: Context = 1024,
    vocabulary: Vocabulary = 8192,
    negatives: Negatives = 1024,
    boost_against: BoostAgainst = None,
    boost_weight: BoostWeight = 0,
    lr: t.LearningRate = 2e-3,
    warmup: t.Warmup = 0.05,
    weight_decay: t.WeightDecay = 0.01,
    clip: t.Clip = 1.0,
    seed: t.TrainSeed = 0,
    keep_best: t.KeepBest = False,
    init: InitModel = None,
    work_dir: t.WorkDir = None,
    resume: t.Resume = True,
    checkpoint_minutes: t.CheckpointMinutes = 10.0,
    dtype: t.TrainDtype = "auto",
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
) -> None:
    """Train a small model from scratch to draft for the target (SpecInfer's boost-tuned models)."""
    from outrider.training.train_model import SmallModelOptions, train_small_model

    earlier = () if boost_against is None else tuple(name.strip() for name in boost_against.split(",") if name.strip())
    if boost_weight == 1:
        raise InvalidOptionError("--boost-weight 1 would change nothing; give 0, or 2 and more")
    options = SmallModelOptions(hidden, layers, heads, intermediate, context, negatives, earlier, boost_weight, init)
    with TrainTable(Console(stderr=True)) as table:
        asked = _asked(
            table, data, output, model, (tokens, minutes), (row, batch_tokens), validation, vocabulary,
            (lr, warmup, weight_decay, clip), (seed, keep_best), (work_dir, resume, checkpoint_minutes),
            (dtype, device, threads),
        )  # fmt: skip
        with t.interruptible(table, asked.upkeep.folder, resume):
            trained = train_small_model(asked, options, table.note)
    _tell(trained, "small model")
    _hint(f"use it with: --model {model} --drafter small_model --draft-model {output}")


def medusa2(  # one line an option; the work is in training/train_medusa2.py
    data: t.Data,
    output: Directory,
    model: o.Model = o.ENGINE.model,
    tokens: t.Tokens = None,
    minutes: t.Minutes = None,
    validation: t.Validation = 0.02,
    row: t.Row = 512,
    batch_tokens: t.BatchTokens = 2048,
    heads: MedusaHeads = 4,
    rank: Rank = 32,
    alpha: Alpha = 16.0,
    heads_weight: HeadsWeight = 0.2,
    head_rate: HeadRate = 4.0,
    vocabulary: Vocabulary = 8192,
    lr: t.LearningRate = 5e-4,
    warmup: t.Warmup = 0.05,
    weight_decay: t.WeightDecay = 0.0,
    clip: t.Clip = 1.0,
    seed: t.TrainSeed = 0,
    keep_best: t.KeepBest = False,
    init: t.Init = None,
    work_dir: t.WorkDir = None,
    resume: t.Resume = True,
    checkpoint_minutes: t.CheckpointMinutes = 10.0,
    dtype: t.TrainDtype = "auto",
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
) -> None:
    """Train the target together with Medusa heads: the result is ANOTHER MODEL, and heads for it."""
    from outrider.training.train_medusa2 import Medusa2Options, train_medusa2

    options = Medusa2Options(heads, rank, alpha, heads_weight, head_rate, init)
    with TrainTable(Console(stderr=True)) as table:
        asked = _asked(
            table, data, output, model, (tokens, minutes), (row, batch_tokens), validation, vocabulary,
            (lr, warmup, weight_decay, clip), (seed, keep_best), (work_dir, resume, checkpoint_minutes),
            (dtype, device, threads),
        )  # fmt: skip
        with t.interruptible(table, asked.upkeep.folder, resume):
            trained = train_medusa2(asked, options, table.note)
    _tell(trained.model, "medusa2")
    typer.echo(
        f"THE TARGET CHANGED: {output} is another model than {model} (fingerprint {trained.before} before, "
        f"{trained.after} after); its answers are close to the old ones, not the same. Adapters are merged."
    )
    if trained.before == trained.after:
        _hint("its norms did not move, so the two models share a fingerprint: nothing tells their heads apart")
    typer.echo(f"{trained.head}: its Medusa heads")
    _hint(f"use it with: --model {output} --drafter medusa:head={trained.head}")


def _asked(
    table: TrainTable,
    data: list[Path],
    output: Path,
    model: str,
    length: tuple[str | None, float | None],
    batch: tuple[int, int],
    validation: float,
    vocabulary: int,
    optimizer: tuple[float, float, float, float],
    course: tuple[int, bool],
    files: tuple[Path | None, bool, float],
    machine: tuple[str, str, int | None],
) -> ModelTraining:
    """The options that both commands have, checked."""
    from outrider.training.optimizer import OptimizerSettings
    from outrider.training.run_state import LoopSettings, Upkeep
    from outrider.training.train_head import training_dtype
    from outrider.training.train_model import ModelTraining

    dtype, device, threads = machine
    t.set_threads(threads)
    lr, warmup, weight_decay, clip = optimizer
    (row, batch_tokens), (seed, keep_best), (work_dir, resume, checkpoint_minutes) = batch, course, files
    loop = LoopSettings(
        **t.budget(*length),
        batch_rows=t.rows_of(batch_tokens, row),
        seed=seed,
        dtype=training_dtype(t.checked_dtype(dtype), device),
        keep_best=keep_best,
        optimizer=OptimizerSettings(lr, warmup, weight_decay=weight_decay, clip=clip),
    )
    work = work_dir or output.with_name(output.name + ".work")
    upkeep = Upkeep(work, checkpoint_seconds=60.0 * checkpoint_minutes, report=table.show)
    return ModelTraining(
        model, data, output, loop, upkeep, vocabulary, row, validation, device, dtype, not resume, t.command_line()
    )


def _tell(trained: TrainedModel, what: str) -> None:
    from outrider.training.curves import draw_curves

    card, figures = trained.card, trained.progress.validation
    try:
        picture = trained.path.with_name(trained.path.name + ".png")
        draw_curves(trained.progress.curves, picture, f"{what}: {trained.path.name}")
    except RunError as error:
        _hint(f"{error}; later: outrider train plot {trained.curves}")
    typer.echo(
        f"{trained.path}: {trained.bytes / 1e6:.1f} MB, {card['tokens']} tokens, {card['epochs']} epochs, "
        f"{card['hours']} hours"
    )
    if figures is not None:
        typer.echo(f"validation: top-1 {top1(figures)}, simulated acceptance length {shown(figures.acceptance)}")


def _hint(sentence: str) -> None:
    Console(stderr=True, highlight=False).print(sentence, markup=False, soft_wrap=True)
