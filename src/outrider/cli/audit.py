"""``outrider audit``: is the output really the target's? Enumeration, planted mistakes, greedy equality, statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.tables import plain_table
from outrider.errors import InvalidOptionError, UsageError
from outrider.sampling.params import SamplingParams
from outrider.text.prompt_file import Message, read_prompts

if TYPE_CHECKING:
    from outrider.audit.plan import AuditPlan, Sizes
    from outrider.audit.report import AuditReport, PartReport
    from outrider.engine.engine import Engine

_AUDIT, _PROMPTS, _OUTPUT = "Audit", "Prompts", "Output"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("audit", epilog="Example: outrider audit --quick --drafter layer_skip")(audit)


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Where the prompts come from: texts, a file, or neither for the built-in ones."""

    texts: Sequence[str] = ()
    file: Path | None = None
    limit: int | None = None
    raw: bool = False


def audit(  # one line an option; the work is below
    parts: Annotated[
        str | None,
        typer.Option(help="Some of exact,faults,greedy,replay,statistics. (default: all)", rich_help_panel=_AUDIT),
    ] = None,
    exact_only: Annotated[
        bool, typer.Option("--exact-only", help="Same as --parts exact,faults: needs no model.", rich_help_panel=_AUDIT)
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller samples, a minute: sees coarse faults.", rich_help_panel=_AUDIT)
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Larger samples and every enumeration.", rich_help_panel=_AUDIT)
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            min=100,
            help="Continuations of a prompt, each way. (default: 2000, quick 200, thorough 5000)",
            rich_help_panel=_AUDIT,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, max=1024, help="Tokens of a continuation. (default: 8, quick 6)", rich_help_panel=_AUDIT),
    ] = None,
    replays: Annotated[
        int | None,
        typer.Option(
            min=1000, help="Replays in all. (default: 200000, quick 20000, thorough 1000000)", rich_help_panel=_AUDIT
        ),
    ] = None,
    greedy_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a greedy output. (default: 64, quick 24, thorough 128)", rich_help_panel=_AUDIT
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="Further drafter of the greedy part; may be repeated. (default: ngram)", rich_help_panel=_AUDIT
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Everything random follows from it.", rich_help_panel=_AUDIT)] = 0,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt; may be repeated. (default: built-in texts)", rich_help_panel=_PROMPTS),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="JSON lines with prompt, text, messages or turns. (default: none)", rich_help_panel=_PROMPTS),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows of --file to use. (default: all)", rich_help_panel=_PROMPTS)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the chat template.", rich_help_panel=_PROMPTS)
    ] = False,
    model: o.Model = o.ENGINE.model,
    drafter: o.Drafter = o.ENGINE.drafter,
    draft_model: o.DraftModel = o.ENGINE.draft_model,
    shape: o.Shape = o.ENGINE.shape,
    proposal: o.Proposal = o.ENGINE.proposal,
    verifier: o.Verifier = o.ENGINE.verifier,
    max_nodes: o.MaxNodes = o.ENGINE.max_nodes,
    lossy: o.Lossy = o.ENGINE.lossy,
    dtype: o.Dtype = o.ENGINE.dtype,
    weights: o.Weights = o.ENGINE.weights,
    device: o.Device = o.ENGINE.device,
    threads: o.Threads = o.ENGINE.threads,
    fallback: o.Fallback = o.ENGINE.fallback,
    trust_remote_code: o.TrustRemoteCode = o.ENGINE.trust_remote_code,
    temperature: o.Temperature = 1.0,
    top_k: o.TopK = o.SAMPLING.top_k,
    top_p: o.TopP = o.SAMPLING.top_p,
    min_p: o.MinP = o.SAMPLING.min_p,
    repetition_penalty: o.RepetitionPenalty = o.SAMPLING.repetition_penalty,
    presence_penalty: o.PresencePenalty = o.SAMPLING.presence_penalty,
    frequency_penalty: o.FrequencyPenalty = o.SAMPLING.frequency_penalty,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, nothing else.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Check that the output is the target's own; exit code 1 when a check fails."""
    params = SamplingParams.parse(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
    )  # fmt: skip
    options = o.EngineOptions(
        model, drafter, draft_model, shape, proposal, verifier, max_nodes, True, lossy, dtype, weights, device,
        threads, fallback, trust_remote_code,
    )  # fmt: skip
    from outrider.audit.plan import AuditPlan, Part, parse_parts

    if quick and thorough:
        raise UsageError("--quick and --thorough exclude each other; give one of them")
    if exact_only and parts is not None:
        raise UsageError("--exact-only and --parts exclude each other; give one of them")
    parts = "exact,faults" if exact_only else parts
    plan = AuditPlan(
        params,
        tuple(Part) if parts is None else parse_parts(parts),
        _sizes(
            quick, thorough, {"samples": samples, "tokens": tokens, "replays": replays, "greedy_tokens": greedy_tokens}
        ),
        seed,
        thorough,
        tuple(also or (() if drafter.startswith("ngram:") else ("ngram",))),
        is_strict=parts is not None,
    )
    found = _run(plan, options, PromptChoice(tuple(prompt or ()), file, limit, raw))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        show(found)
    if not found.passed:
        raise typer.Exit(1)


def _sizes(quick: bool, thorough: bool, asked: Mapping[str, int | None]) -> Sizes:
    from outrider.audit import plan

    chosen = plan.QUICK if quick else plan.THOROUGH if thorough else plan.NORMAL
    return replace(chosen, **{name: value for name, value in asked.items() if value is not None})


def _run(plan: AuditPlan, options: o.EngineOptions, choice: PromptChoice) -> AuditReport:
    from outrider.audit.plan import run_audit

    engine: Engine | None = None
    prompts: list[list[int]] = []
    if plan.needs_engine:
        texts = _texts(choice)  # a mistake in the file shows before the model loads
        engine = engine_factory.load_engine(options)
        prompts = _encoded(engine, texts, choice.raw)
    elif choice.texts or choice.file is not None:
        raise InvalidOptionError("--prompt and --file are for the greedy, replay and statistics parts")
    # The built-in prompts are several for the cheap parts; 2,000 continuations of one say enough.
    is_built_in = not choice.texts and choice.file is None
    with _PartProgress() as progress:
        return run_audit(plan, engine, prompts, prompts[:1] if is_built_in else prompts, progress.report)


def _texts(choice: PromptChoice) -> list[str | Sequence[Message]]:
    """Prompts as given; empty means the built-in ones."""
    if choice.texts and choice.file is not None:
        raise UsageError("--prompt and --file exclude each other; give one of them")
    if choice.limit is not None and choice.file is None:
        raise InvalidOptionError("--limit works only together with --file")
    if choice.file is None:
        if any(not text.strip() for text in choice.texts):
            raise UsageError("a --prompt is empty; give some text")
        return list(choice.texts)
    return [row.messages or row.turns[0] for row in read_prompts(choice.file)[: choice.limit]]


def _encoded(engine: Engine, texts: Sequence[str | Sequence[Message]], raw: bool) -> list[list[int]]:
    from outrider.audit.plan import BUILT_IN_PROMPTS

    if not texts:
        return [engine.encode(text, raw=True) for text in BUILT_IN_PROMPTS]
    return [engine.encode(text, raw=raw) for text in texts]


def show(report: AuditReport) -> None:
    """The tables and the verdict on stdout."""
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in report.settings.items()), markup=False)
    for part in report.parts:
        _show_part(console, part)
    console.print()
    console.print(report.verdict(), style="bold", markup=False)


def _show_part(console: Console, part: PartReport) -> None:
    console.print()
    console.print(f"[bold]{part.name}[/]: {part.status.value}")
    console.print(escape(part.summary))
    if part.table:
        table = plain_table(*part.columns, right=part.numeric)
        for row in part.table:
            table.add_row(*map(escape, row))
        console.print(table)
    for note in part.notes:
        console.print(f"- {escape(note)}")


class _PartProgress:
    """A bar on stderr for each part, with the time left."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _PartProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def report(self, part: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` of ``part`` is through."""
        if part not in self._tasks:
            self._tasks[part] = self._bars.add_task(part, total=total)
        self._bars.update(self._tasks[part], completed=done, total=total)
