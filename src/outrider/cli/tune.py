"""``outrider tune``: measurements that make speculation fit a model, a drafter and a machine.

``outrider tune acceptance`` measures the acceptance vector for ``--shape sequoia``.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli import engine_factory, tune_layers
from outrider.cli import options as o
from outrider.cli.progress import counting_bar
from outrider.cli.tables import plain_table
from outrider.errors import InvalidOptionError
from outrider.sampling.params import SamplingParams
from outrider.text.prompt_file import read_prompts

if TYPE_CHECKING:
    from outrider.engine.acceptance import Acceptance

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
_MEASURING = "Measuring"

tune_app = typer.Typer(help="Measure what makes speculation fit a model and a drafter.")


def register(app: typer.Typer) -> None:
    """Add the group of commands to ``app``."""
    tune_layers.register(tune_app)
    app.add_typer(tune_app, name="tune")


@tune_app.command("acceptance", epilog="Example: outrider tune acceptance --drafter layer_skip:25 --output vector.json")
def acceptance(  # one line an option; the work is in engine/acceptance.py
    model: o.Model = o.ENGINE.model,
    drafter: o.Drafter = o.ENGINE.drafter,
    draft_model: o.DraftModel = o.ENGINE.draft_model,
    proposal: o.Proposal = o.ENGINE.proposal,
    verifier: o.Verifier = o.ENGINE.verifier,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
    fallback: o.Fallback = o.ENGINE.fallback,
    trust_remote_code: o.TrustRemoteCode = o.ENGINE.trust_remote_code,
    temperature: o.Temperature = o.SAMPLING.temperature,
    top_k: o.TopK = o.SAMPLING.top_k,
    top_p: o.TopP = o.SAMPLING.top_p,
    seed: o.Seed = o.SAMPLING.seed,
    max_new_tokens: o.MaxNewTokens = 64,
    ignore_eos: o.IgnoreEos = o.SAMPLING.ignore_eos,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, as 'generate --file' takes them. (default: 8 built in)", rich_help_panel=_MEASURING
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Use the first prompts only, at least 1. (default: all)", rich_help_panel=_MEASURING),
    ] = None,
    width: Annotated[
        int, typer.Option(help="Children looked at, 1 to 64; more see rarer acceptances.", rich_help_panel=_MEASURING)
    ] = 16,
    output: Annotated[
        Path, typer.Option(help="JSON file to write, for sequoia:acceptance=FILE.", rich_help_panel=_MEASURING)
    ] = Path("acceptance.json"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON. (default: tables)", rich_help_panel=_MEASURING)
    ] = False,
) -> None:
    """Measure which of a drafter's guesses are accepted, for --shape sequoia:acceptance=FILE."""
    from outrider.engine.acceptance import PROMPTS, check_output, measure_acceptance

    params = SamplingParams.parse(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_new_tokens, ignore_eos=ignore_eos
    )
    if limit is not None and limit < 1:
        raise InvalidOptionError(f"--limit {limit} is not allowed: it must be at least 1")
    check_output(output)
    if file is not None and output.exists() and file.exists() and output.samefile(file):
        raise InvalidOptionError(f"--output {output} is the file of prompts; choose another name")
    prompts = list(PROMPTS) if file is None else [row.first for row in read_prompts(file)]
    options = o.EngineOptions(
        model, drafter, draft_model, None, proposal, verifier, None, False, False, dtype, weights, device, threads,
        fallback, trust_remote_code,
    )  # fmt: skip
    engine = engine_factory.load_engine(options, params.regime)
    encoded = [engine.encode(prompt, raw=raw) for prompt in prompts[:limit]]
    with counting_bar(Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(encoded))
        measured = measure_acceptance(
            engine, encoded, params, width, lambda done, _: progress.update(task, completed=done)
        )
    measured.save(output, _command(options, params, width, limit, file, raw))
    _show(measured, output, as_json)


def _show(measured: Acceptance, output: Path, as_json: bool) -> None:
    from outrider.trees.shapes.sequoia import expected_tokens

    predicted = {budget: expected_tokens(measured.vector, budget) for budget in BUDGETS}
    if as_json:
        found = {"file": str(output), "vector": measured.vector, "none": measured.none, "steps": measured.steps}
        typer.echo(json.dumps(found | {"predicted_tokens_per_step": predicted}))
        return
    console = Console(highlight=False)
    table = plain_table("child", "accepted", right=[0, 1])
    for place, share in enumerate(measured.vector, 1):
        if share > 0.0:
            table.add_row(str(place), f"{share:.3f}")
    table.add_row("none", f"{measured.none:.3f}")
    console.print(
        f"{measured.steps} steps, {measured.prompts} prompts, {measured.proposal}, {measured.verifier}", table
    )
    table = plain_table("guesses", "tokens per step (predicted)", right=[0, 1])
    for budget, tokens in predicted.items():
        table.add_row(str(budget), f"{tokens:.2f}")
    console.print(table)
    typer.echo(f"written to {output}; use it with --shape sequoia:16,acceptance={output}")


def _command(
    options: o.EngineOptions, params: SamplingParams, width: int, limit: int | None, file: Path | None, raw: bool
) -> str:
    """The command line that measures the same again."""
    words = ["outrider", "tune", "acceptance", "--model", options.model, "--drafter", options.drafter]
    optional = {
        "--draft-model": options.draft_model,
        "--proposal": options.proposal,
        "--verifier": options.verifier,
        "--temperature": params.temperature or None,
        "--top-k": params.top_k or None,
        "--top-p": None if params.top_p == 1.0 else params.top_p,
        "--seed": params.seed,
        "--max-new-tokens": params.max_tokens,
        "--file": file,
        "--limit": limit,
        "--width": width,
        "--dtype": None if options.dtype == "auto" else options.dtype,
        "--weights": None if options.weights == "auto" else options.weights,
        "--device": None if options.device == "auto" else options.device,
    }
    for name, value in optional.items():
        words += [] if value is None else [name, str(value)]
    flags = {"--raw": raw, "--ignore-eos": params.ignore_eos, "--fallback": options.fallback}
    words += [name for name, is_set in flags.items() if is_set]
    return shlex.join(words)
