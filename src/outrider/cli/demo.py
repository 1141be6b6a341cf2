"""``outrider demo``: one prompt, with and without speculation, and what the difference was."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.tables import stats_table
from outrider.sampling.params import SamplingParams
from outrider.types import Regime

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.result import Result

PARAGRAPH = (
    "The old lighthouse stood at the end of the harbour wall. Every evening the keeper climbed the one hundred and "
    "twelve steps, cleaned the great lens, and lit the lamp before the first fishing boats came home. In winter the "
    "wind was so strong that he had to hold the rail with both hands, but the lamp was never late."
)
PROMPT = f"Repeat the following paragraph word for word, then say in one sentence what it is about.\n\n{PARAGRAPH}"
WARM_UP = "Name three rivers."
"""Nothing in it repeats itself, so that drafters which are asked behind a look-up are asked too."""
WARM_UP_TOKENS = 12


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo", epilog="Example: outrider demo --drafter ngram")(demo)


def demo(
    model: o.Model = o.ENGINE.model,
    drafter: o.Drafter = o.ENGINE.drafter,
    draft_model: o.DraftModel = o.ENGINE.draft_model,
    shape: o.Shape = o.ENGINE.shape,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    threads: o.Threads = o.ENGINE.threads,
    max_new_tokens: o.MaxNewTokens = 160,
) -> None:
    """Answer a prompt whose answer repeats part of it, first with speculation, then plainly, and compare."""
    import outrider

    params = SamplingParams.parse(max_tokens=max_new_tokens)
    errors = Console(stderr=True, highlight=False)
    engine = engine_factory.load_engine(
        o.EngineOptions(model, drafter, draft_model, shape, dtype=dtype, weights=weights, threads=threads),
        Regime.GREEDY,
    )
    errors.print(", ".join(f"{name} {value}" for name, value in engine.describe().items()), markup=False)
    prompt, plain_engine = engine.encode(PROMPT), engine.plain()
    warm_up = SamplingParams.parse(max_tokens=min(WARM_UP_TOKENS, max_new_tokens))
    # Without the controller, whose first steps are plain ones: drafting is compiled or loaded before it is timed, too.
    for each in (engine.with_parts(adaptive=False), plain_engine):
        for text in (prompt, engine.encode(WARM_UP)):
            each.generate(text, warm_up)
    typer.echo(f"{PROMPT}\n")
    errors.print("-- with speculation", style="bold")
    fast = _stream(engine, prompt, params)
    errors.print("-- the same prompt, plainly", style="bold")
    slow = _stream(plain_engine, prompt, params)
    console = Console(highlight=False)
    console.print(stats_table({"speculative": fast.stats, "plain": slow.stats}))
    if slow.stats.tokens_per_second > 0:
        console.print(f"speed-up when decoding: {fast.stats.tokens_per_second / slow.stats.tokens_per_second:.2f}x")
    console.print(outrider.compare_outputs(engine, prompt, fast.tokens, slow.tokens).describe(), markup=False)


def _stream(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Result:
    result = None
    for event in engine.stream(prompt, params):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        result = event.result or result
    if result is None:
        raise RuntimeError("the engine's stream ended without a result")
    typer.echo("\n")
    return result
