"""``outrider tune heads``: the static tree that fits Medusa or Hydra heads, from their measured accuracy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.tables import plain_table

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.training.medusa_tree import HeadAccuracy
    from outrider.training.objectives.per_depth import PerDepthObjective
    from outrider.training.packing import Piece
    from outrider.trees.shapes.structure import RankPath

_ROW = 1024
_ROWS = 4
_TREE = "Tree"


def register(group: typer.Typer) -> None:
    """Add the command to ``group``."""
    group.command("heads", epilog="Example: outrider tune heads --head medusa.safetensors --data features --budget 32")(
        heads
    )


def heads(
    head: Annotated[Path, typer.Option(help="Head file of medusa or hydra.", rich_help_panel=_TREE)],
    data: Annotated[
        list[Path], typer.Option(help="Folder of 'outrider train collect'; may be repeated.", rich_help_panel=_TREE)
    ],
    model: o.Model = o.ENGINE.model,
    dtype: o.Dtype = o.ENGINE.dtype,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
    budget: Annotated[int, typer.Option(help="Guesses in the tree.", min=1, max=4096, rich_help_panel=_TREE)] = 16,
    ranks: Annotated[
        int, typer.Option(help="Guesses looked at in each head.", min=1, max=64, rich_help_panel=_TREE)
    ] = 10,
    tokens: Annotated[
        int,
        typer.Option(
            help="Tokens measured on, about; those kept for validation where there are any.",
            min=1,
            max=10_000_000,
            rich_help_panel=_TREE,
        ),
    ] = 50_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON. (default: a table)")] = False,
) -> None:
    """Measure how often each guess of each head is right, and print the static tree that makes the most of it."""
    from outrider.trees.shapes.from_accuracy import paths_from_accuracy

    options = o.EngineOptions(model, "none", dtype=dtype, device=device, threads=threads)
    engine = engine_factory.load_engine(options)
    accuracy = _measure(_open(head, engine), engine, data, ranks, tokens)
    _show(accuracy, paths_from_accuracy(accuracy.shares, budget), as_json)


def _open(head: Path, engine: Engine) -> PerDepthObjective:
    import torch

    from outrider.drafters.base import DraftParts
    from outrider.drafters.head_options import check_head
    from outrider.errors import InvalidOptionError
    from outrider.heads.file import load_head
    from outrider.heads.per_depth import PerDepthNetwork
    from outrider.text.vocabulary import vocabulary_hash
    from outrider.training.objectives.per_depth import PerDepthObjective, PerDepthOptions

    network = load_head(head)
    if not isinstance(network, PerDepthNetwork):
        raise InvalidOptionError(
            f"{head} is a head of {network.spec.method}; heads that guess each depth by themselves have an accuracy to "
            "measure: give one of medusa or hydra, or use 'outrider tune acceptance'"
        )
    check_head(network, DraftParts(engine.model, vocabulary_hash=partial(vocabulary_hash, engine.tokenizer)), str(head))
    return PerDepthObjective(network.to(engine.model.device), engine.model, PerDepthOptions(), torch.float32)


def _measure(
    objective: PerDepthObjective, engine: Engine, folders: list[Path], ranks: int, tokens: int
) -> HeadAccuracy:
    from outrider.errors import UsageError
    from outrider.models.fingerprint import fingerprint
    from outrider.training.batches import BatchReader
    from outrider.training.medusa_tree import measure_top_k
    from outrider.training.packing import open_corpus, pack

    corpus = open_corpus(folders, objective.features, _ROW)
    key = fingerprint(engine.model)
    if key is not None and corpus.fingerprint.target and corpus.fingerprint.target != key:
        raise UsageError(f"{folders[0]} was collected from another model than '{engine.model.name}'; collect it again")
    reader = BatchReader(corpus, objective.features, _ROWS)
    rows = pack(_first(corpus.validation or corpus.training, tokens), _ROW)
    batches = (reader.read(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS))
    try:
        return measure_top_k(objective, (batch.to(engine.model.device) for batch in batches), ranks)
    except ValueError as error:
        raise UsageError(f"{folders[0]}: {error}") from None


def _first(pieces: list[Piece], tokens: int) -> list[Piece]:
    """Pieces from the first on, about ``tokens`` long together."""
    chosen: list[Piece] = []
    left = tokens
    for piece in pieces:
        if left <= 0:
            break
        chosen.append(piece)
        left -= len(piece)
    return chosen


def _show(accuracy: HeadAccuracy, paths: list[RankPath], as_json: bool) -> None:
    from outrider.trees.shapes.from_accuracy import expected_tokens, paths_text

    shape = f"static:{paths_text(paths)}"
    predicted = expected_tokens(accuracy.shares, paths)
    if as_json:
        found = {"accuracy": accuracy.shares, "positions": accuracy.positions, "shape": shape}
        typer.echo(json.dumps(found | {"predicted_tokens_per_step": predicted}))
        return
    console = Console(highlight=False)
    shown = range(min(5, len(accuracy.shares[0])))
    table = plain_table(
        "head", "positions", *(f"guess {rank + 1}" for rank in shown), right=[0, 1, *(r + 2 for r in shown)]
    )
    for number, (shares, positions) in enumerate(zip(accuracy.shares, accuracy.positions, strict=True), 1):
        table.add_row(str(number), str(positions), *(f"{shares[rank]:.3f}" for rank in shown))
    console.print(table)
    typer.echo(f"{len(paths)} guesses, {predicted:.2f} tokens per step if heads were independent; use it with")
    typer.echo(f"--shape {shape}")
