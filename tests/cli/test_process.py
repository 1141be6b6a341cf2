"""The process around the commands: start-up cost, re-exec, errors, exit codes, pipes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
from fake_engine import Loader

from outrider.cli import app, reexec
from outrider.errors import DownloadError

COMMANDS = ["generate", "chat", "demo", "audit", "models", "methods", "pull", "doctor"]
SUBCOMMANDS = ["tune acceptance", "tune layers", "datastore build"]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from outrider.cli.app import run; run(['generate', '--help']); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert python("-c", code).returncode == 0


def test_version_through_the_module() -> None:
    done = python("-m", "outrider", "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("outrider 0.")


@pytest.mark.parametrize("command", COMMANDS + SUBCOMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([*command.split(), "--help"]) == 0
    assert f"Example: outrider {command}" in capsys.readouterr().out


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([]) == 0
    out = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in out] == []


def test_reexec_keeps_arguments_and_happens_once() -> None:
    code = (
        "import os, sys; from outrider.cli.reexec import ensure_allocator; print('start', flush=True); "
        "ensure_allocator(); print(os.environ.get('MALLOC_TOP_PAD_'), sys.argv[1:])"
    )
    clean = dict.fromkeys((*reexec.SETTINGS, reexec.MARKER), "")
    environment = {k: v for k, v in os.environ.items() if k not in clean}
    done = subprocess.run(
        [sys.executable, "-c", code, "a b", "--c"], capture_output=True, text=True, check=True, env=environment
    )
    starts = 2 if reexec.is_glibc() else 1
    assert done.stdout.splitlines()[:-1] == ["start"] * starts
    assert done.stdout.splitlines()[-1].endswith("['a b', '--c']")
    if reexec.is_glibc():
        assert done.stdout.splitlines()[-1].startswith(reexec.SETTINGS["MALLOC_TOP_PAD_"])


def test_reexec_environment() -> None:
    made = reexec.reexec_environment({"PATH": "/bin", "MALLOC_TOP_PAD_": "1"}, glibc=True)
    assert made is not None
    assert made["MALLOC_TOP_PAD_"] == "1"  # the user's own setting stays
    assert made["PATH"] == "/bin"
    assert reexec.is_active(made)
    assert reexec.reexec_environment(made, glibc=True) is None
    assert reexec.reexec_environment({}, glibc=False) is None
    assert reexec.reexec_environment(dict(reexec.SETTINGS), glibc=True) is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["generate", "x", "--modle", "y"], 2, "--modle"),
        (["generate", "x", "--top-k", "many"], 2, "valid integer"),
        (["nonsense"], 2, "nonsense"),
        (["generate"], 2, "give a PROMPT"),
        (["generate", "  "], 2, "prompt is empty"),
        (["generate", "caf\udce9"], 2, "prompt is not UTF-8"),  # how Python passes the Latin-1 bytes of "café"
        (["generate", "\ud83d"], 2, "prompt is not UTF-8"),
        (["generate", "x", "--stop", "\udce9"], 2, "valid Unicode"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature=-1.0"),
        (["generate", "x", "--top-p", "0"], 2, "top_p"),
        (["generate", "x", "--grammar", "root ::= 'a'"], 2, "not supported yet"),
        (["generate", "x", "--logit-bias", "5"], 2, "ID=VALUE"),
        (["generate", "x", "--batch", "2"], 2, "--batch"),
        (["generate", "x", "--output", "y"], 2, "--output"),
        (["generate", "x", "--file", "y"], 2, "exclude each other"),
        (["generate", "--file", "/no/such", "--json"], 2, "--json"),
        (["generate", "--file", "/no/such"], 2, "cannot read"),
        (["generate", "x", "--compare", "--temperature", "1"], 2, "temperature 0"),
        (["pull", "smolm2-135m"], 2, "did you mean 'smollm2-135m'"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], code: int, words: str, loader: Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("outrider: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert loader.options == []  # nothing was loaded for a wrong request


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DownloadError("no network"), 1, "outrider: error: no network"),
        (ValueError("odd\nthing"), 1, "unexpected ValueError: odd thing (set OUTRIDER_DEBUG=1"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_failures_have_their_codes(
    error: BaseException,
    code: int,
    words: str,
    loader: Loader,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.delenv(app.DEBUG_VARIABLE, raising=False)
    monkeypatch.setattr(loader.engine, "stream", fail)
    if isinstance(error, BrokenPipeError):
        monkeypatch.setattr(app, "_discard_output", lambda: 1)  # it replaces the process's own stdout
    assert app.run(["generate", "x"]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") <= 1


def test_debug_variable_gives_the_traceback(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(app.DEBUG_VARIABLE, "1")
    monkeypatch.setattr(loader.engine, "encode", lambda *_, **__: 1 / 0)
    assert app.run(["generate", "x"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def start(arguments: list[str], **streams: object) -> subprocess.CompletedProcess[str]:
    """The real program, with its own streams."""
    command = [sys.executable, "-m", "outrider", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **streams)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "arguments",
    [["models"], ["models", "--json"], ["generate", "x", "--model", "toy", "-n", "4", "--ignore-eos"]],
    ids=["rich", "plain", "streamed"],
)
def test_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    """Printed by rich, by typer, and while streaming: each turns the broken pipe into something else."""
    reader, writer = os.pipe()
    os.close(reader)
    done = start(arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"]], ids=["rich", "plain"])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = start(arguments, stdout=full)
    assert (done.returncode, done.stderr) == (1, "outrider: error: No space left on device\n")


def test_os_errors_name_their_file(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/data/model")

    monkeypatch.setattr(loader.engine, "stream", fail)
    assert app.run(["generate", "x"]) == 1
    assert capsys.readouterr().err == "outrider: error: Input/output error '/data/model'\n"


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["models", "--json"]) == 0
    assert {"smollm2-135m", "gemma3-270m"} <= {row["name"] for row in json.loads(capsys.readouterr().out)}
