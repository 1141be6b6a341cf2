"""``outrider convert``: a draft head of another project -> Outrider's file, and ours -> theirs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli.engine_factory import FetchProgress

if TYPE_CHECKING:
    from outrider.heads.formats.base import TargetFacts
    from outrider.heads.formats.convert import Converted


class _Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("convert", epilog="Example: outrider convert my-eagle3/ head.safetensors --target smollm2-135m")(
        convert
    )


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A head's directory or weight file.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="New directory; for Outrider's format also a .safetensors file.")
    ],
    from_format: Annotated[
        str,
        typer.Option(
            "--from",
            help="auto, outrider, medusa, vllm-medusa, hydra, eagle, eagle3, sglang or speculators.",
        ),
    ] = "auto",
    to_format: Annotated[
        str, typer.Option("--to", help="outrider, eagle3, speculators, sglang or vllm-medusa.")
    ] = "outrider",
    target: Annotated[
        str | None,
        typer.Option(
            help="The model that the head is for: checked, and asked for what the files lack. (default: none)"
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Refuse a head of another method. (default: any)")] = None,
    dtype: Annotated[_Dtype, typer.Option(help="Type of the numbers that are written.")] = _Dtype.BFLOAT16,
) -> None:
    """Convert a trained draft head between Outrider's file and the formats of other engines."""
    import torch

    from outrider.heads.formats.convert import convert as convert_head

    facts = None if target is None else _facts(target)
    number_type: torch.dtype = getattr(torch, dtype.value)
    done = convert_head(source, destination, from_format, to_format, facts, method, number_type)
    for line in describe(done):
        typer.echo(line)
    Console(stderr=True, highlight=False).print(_next_step(done, to_format, target), markup=False, soft_wrap=True)


def describe(done: Converted) -> list[str]:
    """What was read and where it went, a line each."""
    config = done.network.config
    numbers = sum(parameter.numel() for parameter in done.network.parameters())
    layers = ", ".join(
        "final hidden state" if name == "final" else f"input of block {name}" for name in config.features
    )
    vocabulary = f"{config.vocab_size} tokens"
    if config.draft_vocab_size < config.vocab_size:
        vocabulary = f"{config.draft_vocab_size} of {vocabulary}"
    flags = [name for name, is_set in config.flags().items() if is_set and name != "reduced"]
    return [
        f"method      {config.method} (from {done.source_format})",
        f"size        hidden {config.hidden_size}, {numbers / 1e6:.2f} million numbers",
        f"reads       {layers}",
        f"guesses     {vocabulary}",
        f"flags       {', '.join(flags) or 'none'}",
        f"written to  {done.written}",
    ]


def _facts(target: str) -> TargetFacts:
    from outrider.config import EngineConfig
    from outrider.engine.loading import load_model
    from outrider.heads.formats.base import facts_of
    from outrider.text.vocabulary import vocabulary_hash

    with FetchProgress() as progress:
        loaded = load_model(target, EngineConfig(), progress.report)
    return facts_of(loaded.model, target, vocabulary_hash(loaded.tokenizer))


def _next_step(done: Converted, to_format: str, target: str | None) -> str:
    if to_format != "outrider":
        return "how to serve it: docs/interoperability.md"
    path = done.written if done.written.is_file() else done.written / "head.safetensors"
    return f"use it with: --model {target or 'TARGET'} --drafter {done.network.config.method}:head={path}"
