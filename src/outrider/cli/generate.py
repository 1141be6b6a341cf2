"""``outrider generate``: one prompt, or a file of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.prompt_run import FileRun, run_file
from outrider.cli.tables import logprob_table, stats_table
from outrider.cli.tree_view import step_tree
from outrider.errors import InvalidOptionError, UsageError
from outrider.sampling.params import SamplingParams
from outrider.types import Regime

if TYPE_CHECKING:
    from outrider.audit.divergence import Comparison
    from outrider.engine.engine import Engine
    from outrider.engine.result import Result

_FILES, _OUTPUT = "Files", "Output"
_FILE_ONLY = "only together with --file"


@dataclass(frozen=True, slots=True)
class Presentation:
    """What to show besides the text."""

    raw: bool
    as_json: bool
    show_tree: bool
    stats: bool
    compare: bool


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate", epilog="Example: outrider generate 'Name three rivers.' --stats")(generate)


def generate(  # one line an option; the work is below
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' reads it from standard input.")] = None,
    model: o.Model = o.ENGINE.model,
    drafter: o.Drafter = o.ENGINE.drafter,
    draft_model: o.DraftModel = o.ENGINE.draft_model,
    shape: o.Shape = o.ENGINE.shape,
    proposal: o.Proposal = o.ENGINE.proposal,
    verifier: o.Verifier = o.ENGINE.verifier,
    max_nodes: o.MaxNodes = o.ENGINE.max_nodes,
    adaptive: o.Adaptive = o.ENGINE.adaptive,
    lossy: o.Lossy = o.ENGINE.lossy,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
    fallback: o.Fallback = o.ENGINE.fallback,
    trust_remote_code: o.TrustRemoteCode = o.ENGINE.trust_remote_code,
    temperature: o.Temperature = o.SAMPLING.temperature,
    top_k: o.TopK = o.SAMPLING.top_k,
    top_p: o.TopP = o.SAMPLING.top_p,
    min_p: o.MinP = o.SAMPLING.min_p,
    seed: o.Seed = o.SAMPLING.seed,
    max_new_tokens: o.MaxNewTokens = o.SAMPLING.max_tokens,
    min_tokens: o.MinTokens = o.SAMPLING.min_tokens,
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    ignore_eos: o.IgnoreEos = o.SAMPLING.ignore_eos,
    repetition_penalty: o.RepetitionPenalty = o.SAMPLING.repetition_penalty,
    presence_penalty: o.PresencePenalty = o.SAMPLING.presence_penalty,
    frequency_penalty: o.FrequencyPenalty = o.SAMPLING.frequency_penalty,
    logit_bias: o.LogitBias = None,
    logprobs: o.Logprobs = o.SAMPLING.logprobs,
    grammar: o.Grammar = o.SAMPLING.grammar,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the chat template.", rich_help_panel=_OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.", rich_help_panel=_OUTPUT)
    ] = False,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Draw every step's tree on stderr.", rich_help_panel=_OUTPUT)
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Statistics on stderr (always on a terminal).", rich_help_panel=_OUTPUT)
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too, say whether identical.", rich_help_panel=_OUTPUT)
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, text, messages or turns. (default: none)", rich_help_panel=_FILES),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Prompts decoded together, at least 1. (default: 1)", rich_help_panel=_FILES)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON lines to append to; a rerun continues. (default: stdout)", rich_help_panel=_FILES),
    ] = None,
) -> None:
    """Answer a prompt, or every prompt of a file, and print the text as it is found."""
    engine_options = o.EngineOptions(
        model, drafter, draft_model, shape, proposal, verifier, max_nodes, adaptive, lossy, dtype, weights, device,
        threads, fallback, trust_remote_code,
    )  # fmt: skip
    params = SamplingParams.parse(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_new_tokens,
        min_tokens=min_tokens, stop=tuple(stop or ()), stop_token_ids=tuple(stop_token_id or ()), ignore_eos=ignore_eos,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=o.parse_logit_bias(logit_bias), logprobs=logprobs, grammar=grammar,
    )  # fmt: skip
    show = Presentation(raw, as_json, show_tree, stats, compare)
    if file is not None:
        _check_file_options(prompt, show)
        run_file(FileRun(file, output, 1 if batch is None else batch, raw, stats), engine_options, params)
        return
    for name, value in (("batch", batch), ("output", output)):
        if value is not None:
            raise InvalidOptionError(f"--{name} works {_FILE_ONLY}")
    text = read_prompt(prompt)
    if compare and params.regime is Regime.SAMPLED:
        raise InvalidOptionError("--compare needs temperature 0: sampled answers share a law, not their tokens")
    engine = engine_factory.load_engine(engine_options, params.regime)
    answer(engine, engine.encode(text, raw=raw), params, show)


def read_prompt(prompt: str | None) -> str:
    """The prompt text; ``-`` is standard input.

    Raises:
        UsageError: when there is none.
    """
    if prompt is None:
        raise UsageError("give a PROMPT, '-' to read it from standard input, or --file prompts.jsonl")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        # Where the locale is not UTF-8, Python hides the bytes it could not decode in surrogates; they are UTF-8.
        text = text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise UsageError("the prompt is not UTF-8 text; convert it first") from None
    if not text.strip():
        raise UsageError("the prompt is empty; give some text")
    return text


def answer(engine: Engine, prompt: Sequence[int], params: SamplingParams, show: Presentation) -> None:
    """Run one request and show what was asked for."""
    errors = Console(stderr=True)
    result = _run(engine, prompt, params, show, errors)
    plain = engine.plain().generate(prompt, params) if show.compare else None
    comparison = None if plain is None else _compare(engine, prompt, params, result, plain)
    if show.as_json:
        typer.echo(json.dumps(_json_object(engine, result, plain, comparison), ensure_ascii=False))
        return
    if result.logprobs is not None:
        errors.print(logprob_table(result.logprobs, engine.tokenizer))
    if show.stats or show.compare or sys.stdout.isatty():
        runs = {"speculative": result.stats} | ({} if plain is None else {"plain": plain.stats})
        errors.print(stats_table(runs), f"finished by: {result.finish_reason.value}", sep="\n")
    if comparison is not None:
        errors.print(comparison.describe(), highlight=False)


def _run(engine: Engine, prompt: Sequence[int], params: SamplingParams, show: Presentation, errors: Console) -> Result:
    """Stream the text to stdout; with trees it comes at the end, so that it is not torn apart by them."""
    is_streaming = not (show.as_json or show.show_tree)
    result, step = None, 0
    with closing(engine.stream(prompt, params)) as events:  # type: ignore[type-var]
        for event in events:
            if show.show_tree and event.record is not None:
                errors.print(step_tree(event.record, step, engine.tokenizer), highlight=False)
                step += 1
            if is_streaming and event.text:
                sys.stdout.write(event.text)
                sys.stdout.flush()
            result = event.result or result
    if result is None:
        raise RuntimeError("the engine's stream ended without a result")
    if not show.as_json:
        typer.echo("" if is_streaming else result.text)
    return result


def _compare(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, result: Result, plain: Result
) -> Comparison:
    import outrider

    return outrider.compare_outputs(engine, prompt, result.tokens, plain.tokens, params)


def _json_object(
    engine: Engine, result: Result, plain: Result | None, comparison: Comparison | None
) -> dict[str, object]:
    found: dict[str, object] = {
        "text": result.text,
        "finish_reason": result.finish_reason.value,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": len(result.tokens),
        "tokens": list(result.tokens),
        "stats": result.stats.to_dict(),
        "engine": engine.describe(),
    }
    if result.logprobs is not None:
        found["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for entry in result.logprobs
        ]
    if plain is not None and comparison is not None:
        found["plain"] = {"text": plain.text, "tokens": list(plain.tokens), "stats": plain.stats.to_dict()}
        found["comparison"] = comparison.describe()
    return found


def _check_file_options(prompt: str | None, show: Presentation) -> None:
    if prompt is not None:
        raise UsageError("PROMPT and --file exclude each other; give one of them")
    for name, is_set in (("json", show.as_json), ("show-tree", show.show_tree), ("compare", show.compare)):
        if is_set:
            raise InvalidOptionError(f"--{name} does not work with --file; its output is JSON lines already")
