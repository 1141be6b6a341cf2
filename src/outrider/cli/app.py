"""The ``outrider`` application: its commands, and the one border where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import outrider
from outrider.cli import (
    audit,
    catalogue,
    chat,
    convert,
    datastore,
    demo,
    doctor,
    generate,
    methods,
    train,
    train_models,
    tune,
    tune_heads,
)
from outrider.errors import OutriderError

INTERRUPTED = 130
BROKEN_PIPE = 141
DEBUG_VARIABLE = "OUTRIDER_DEBUG"

app = typer.Typer(
    name="outrider",
    help="Speculative decoding: the same answers from a language model, faster.",
    epilog="Start with: outrider demo",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {outrider.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding: the same answers from a language model, faster."""


generate.register(app)
chat.register(app)
demo.register(app)
catalogue.register(app)
methods.register(app)
audit.register(app)
tune_heads.register(tune.tune_app)
tune.register(app)
train.register(app)
train_models.register(train.train_app)
convert.register(app)
datastore.register(app)
doctor.register(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Errors are one line on stderr.

    Codes: 0 success, 1 the work failed, 2 the request was wrong, 130 interrupted, 141 the reader of a pipe went away.
    """
    _tolerate_narrow_encodings()
    try:
        code = typer.main.get_command(app).main(
            list(arguments) or ["--help"], prog_name="outrider", standalone_mode=False
        )
        sys.stdout.flush()
    except OutriderError as error:
        _print_traceback_if_wanted()
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _discard_output()
    except OSError as error:  # no space left for the output, for example
        _print_traceback_if_wanted()
        where = f" '{error.filename}'" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}", 1)
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # typer and rich turn it into an exit with code 1
            return _discard_output()
        return leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:
        if hasattr(error, "format_message"):  # a mistake in the command line; the class's home differs between typers
            return _fail(f"{error.format_message()} (see 'outrider --help')", 2)
        if _print_traceback_if_wanted():
            return 1
        text = " ".join(str(error).split()) or "no message"
        return _fail(f"unexpected {type(error).__name__}: {text} (set {DEBUG_VARIABLE}=1 for the traceback)", 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"outrider: error: {message}\n")
    return code


def _print_traceback_if_wanted() -> bool:
    wanted = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if wanted:
        traceback.print_exc()
    return wanted


def _discard_output() -> int:
    """The reader of a pipe went away (``| head``): end as a program killed by SIGPIPE would, without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would fail, and say so
    return BROKEN_PIPE


def _tolerate_narrow_encodings() -> None:
    """Text that the terminal's encoding lacks is shown as '?', it does not end the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
