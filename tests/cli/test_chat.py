"""``outrider chat``: turns, commands, Ctrl-C, the end of the input."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, Loader

from outrider.cli import app
from outrider.errors import ContextLengthError


@pytest.fixture
def talk(
    loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(lines: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = app.run(["chat", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


Talk = Callable[..., tuple[int, str, str]]


def test_turns_build_on_each_other(talk: Talk, loader: Loader) -> None:
    code, out, _ = talk("one\n\ntwo\n", "--system", "be brief")
    assert code == 0
    assert out == "you said: one\nyou said: two\n"
    assert loader.engine.prompts[-1][0] == [  # type: ignore[index]
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "you said: one"},
        {"role": "user", "content": "two"},
    ]
    assert loader.engine.sessions[0] is loader.engine.sessions[1]


def test_commands(talk: Talk, loader: Loader) -> None:
    _, out, err = talk("/stats\none\n/stats\n/clear\ntwo\n/help\n/what\n/exit\nnever\n")
    assert out == "you said: one\nyou said: two\n"
    assert "no answer yet" in err
    assert "tokens per second" in err
    assert "unknown command /what" in err
    assert loader.engine.prompts[-1][0] == [{"role": "user", "content": "two"}]  # type: ignore[index]
    assert loader.engine.sessions[0] is not loader.engine.sessions[1]


def test_ctrl_c_stops_the_answer_not_the_program(talk: Talk, loader: Loader) -> None:
    loader.engine.interrupt_after = 3
    code, out, err = talk("one\ntwo\n")
    assert code == 0
    assert out == "youyou"
    assert err.count("(stopped)") == 2
    assert loader.engine.closed == 2  # the streams were left properly
    assert loader.engine.prompts[-1][0][1] == {"role": "assistant", "content": "you"}  # type: ignore[index]


def test_a_refused_turn_is_forgotten(talk: Talk, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = FakeEngine.encode

    def refuse_long(engine: FakeEngine, prompt: object, raw: bool = False) -> list[int]:
        if "long" in str(prompt):
            raise ContextLengthError("too long")
        return encode(engine, prompt, raw)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine, "encode", refuse_long)
    code, out, err = talk("long\nok\n")
    assert (code, out) == (0, "you said: ok\n")
    assert "too long (/clear starts anew)" in err


def test_a_model_without_template_cannot_chat(talk: Talk, loader: Loader) -> None:
    loader.engine.tokenizer.chat_template = None
    code, _, err = talk("hi\n")
    assert code == 2
    assert "no chat template" in err


def test_at_a_terminal(loader: Loader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C at the prompt goes on, Ctrl-D leaves."""
    answers: list[str | type[BaseException]] = [KeyboardInterrupt, "hi", EOFError]

    def typed(_: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", typed)
    assert app.run(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "you said: hi\n\n"
    assert "(Ctrl-D or /exit leaves)" in captured.err
