"""``outrider chat``: a conversation in the terminal, or from piped lines. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli import engine_factory
from outrider.cli import options as o
from outrider.cli.tables import stats_table
from outrider.errors import InvalidOptionError, UsageError
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.result import Result

HELP = (
    "/clear forgets the conversation, /stats shows the last answer's figures, /exit or Ctrl-D leaves, "
    "Ctrl-C stops an answer"
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("chat", epilog="Example: outrider chat --temperature 0.7 --system 'Answer briefly.'")(chat)


def chat(
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
    temperature: o.Temperature = o.SAMPLING.temperature,
    top_k: o.TopK = o.SAMPLING.top_k,
    top_p: o.TopP = o.SAMPLING.top_p,
    min_p: o.MinP = o.SAMPLING.min_p,
    seed: o.Seed = o.SAMPLING.seed,
    max_new_tokens: o.MaxNewTokens = o.SAMPLING.max_tokens,
    stop: o.Stop = None,
    repetition_penalty: o.RepetitionPenalty = o.SAMPLING.repetition_penalty,
    system: Annotated[str | None, typer.Option(help="System message. (default: the chat template's)")] = None,
) -> None:
    """Talk with the model; the caches of earlier turns are kept."""
    engine_options = o.EngineOptions(
        model, drafter, draft_model, shape, proposal, verifier, max_nodes, adaptive, lossy, dtype, weights, device,
        threads,
    )  # fmt: skip
    params = SamplingParams.parse(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_new_tokens,
        stop=tuple(stop or ()), repetition_penalty=repetition_penalty,
    )  # fmt: skip
    engine = engine_factory.load_engine(engine_options, params.regime)
    if engine.tokenizer.chat_template is None:
        raise InvalidOptionError(
            f"model '{model}' has no chat template, so it cannot hold a conversation; use 'outrider generate'"
        )
    Conversation(engine, params, system).run()


class Conversation:
    """The loop of prompts and answers."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._errors = Console(stderr=True)
        self._last: Result | None = None
        self._clear()

    def run(self) -> None:
        """Until /exit or the end of the input."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            self._errors.print(HELP, highlight=False, markup=False)
        while True:
            try:
                line = _read_line(is_terminal)
            except KeyboardInterrupt:
                self._errors.print("\n(Ctrl-D or /exit leaves)", highlight=False)
                continue
            if line is None or line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/clear":
            self._clear()
        elif line == "/stats" and self._last is not None:
            self._errors.print(stats_table({"last answer": self._last.stats}))
        elif line == "/stats":
            self._errors.print("no answer yet", highlight=False)
        else:
            known = "" if line == "/help" else f"unknown command {line}: "
            self._errors.print(known + HELP, highlight=False, markup=False)

    def _clear(self) -> None:
        self._messages = list(self._opening)
        self._session = self._engine.new_session()

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            text = self._answer()
        except UsageError as error:  # the conversation outgrew the context, for example
            self._messages.pop()
            self._errors.print(f"{error} (/clear starts anew)", highlight=False, markup=False)
            return
        self._messages.append({"role": "assistant", "content": text})

    def _answer(self) -> str:
        """Stream one answer; what was shown before a Ctrl-C stays part of the conversation."""
        shown = ""
        prompt = self._engine.encode(self._messages)
        try:
            with closing(self._engine.stream(prompt, self._params, session=self._session)) as events:  # type: ignore[type-var]
                for event in events:
                    shown += event.text
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                    self._last = event.result or self._last
        except KeyboardInterrupt:
            self._errors.print("\n(stopped)", highlight=False)
        else:
            typer.echo()
        return shown


def _read_line(is_terminal: bool) -> str | None:
    """The next line without surrounding space; ``None`` at the end of the input."""
    if not is_terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() history and editing
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return None
