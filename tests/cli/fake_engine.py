"""An engine that answers ``you said: <last user text>`` a character a token, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

from outrider.cli.options import EngineOptions
from outrider.engine.result import Event, Result
from outrider.engine.stats import fold
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, Regime, StepRecord, StepTimes


class FakeTokenizer:
    chat_template: str | None = "{{ messages }}"

    def readable(self, token: int) -> str:
        return chr(token)


class FakeEngine:
    """Records what it is asked; ``interrupt_after`` raises KeyboardInterrupt in that step of a stream."""

    def __init__(self, interrupt_after: int | None = None, context_length: int = 1000) -> None:
        self.tokenizer = FakeTokenizer()
        self.model = SimpleNamespace(context_length=context_length)
        self.interrupt_after = interrupt_after
        self.prompts: list[object] = []
        self.sessions: list[object] = []
        self.parts: list[dict[str, object]] = []
        self.closed = 0

    def encode(self, prompt: str | Sequence[Mapping[str, str]], raw: bool = False) -> list[int]:
        self.prompts.append((prompt if isinstance(prompt, str) else list(prompt), raw))
        return [ord(c) for c in (prompt if isinstance(prompt, str) else prompt[-1]["content"])]

    def stream(self, prompt: Sequence[int], params: SamplingParams, session: object = None) -> Iterator[Event]:
        self.sessions.append(session)
        result = self._result(prompt, params)
        try:
            for index, record in enumerate(result.records):
                if index == self.interrupt_after:
                    raise KeyboardInterrupt
                is_last = index == len(result.records) - 1
                yield Event(result.text[index], record.emitted, record, result if is_last else None)
        finally:
            self.closed += 1

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Result:
        return self._result(prompt, params)

    def run(
        self, requests: Iterable[tuple[object, Sequence[int], SamplingParams]], batch: int = 1
    ) -> Iterator[tuple[object, Result]]:
        waiting, running = iter(requests), []
        while True:
            while len(running) < batch and (request := next(waiting, None)) is not None:
                running.append(request)
            if not running:
                return
            key, prompt, params = running.pop()  # the newest first: answers come out of order
            yield key, self._result(prompt, params)

    def new_session(self) -> object:
        return object()

    def with_parts(self, **parts: object) -> FakeEngine:
        self.parts.append(parts)
        return self

    def plain(self) -> FakeEngine:
        return self

    def describe(self) -> dict[str, str]:
        return {"model": "fake"}

    def _result(self, prompt: Sequence[int], params: SamplingParams) -> Result:
        text = ("you said: " + "".join(map(chr, prompt)))[: params.max_tokens]
        tokens = tuple(map(ord, text))
        times = StepTimes(0.1, 0.2, 0.3, 0.4)
        records = tuple(
            StepRecord("decode" if i else "prefill", i, 0, 0, (token,), times=times) for i, token in enumerate(tokens)
        )
        stats = fold(records, len(prompt))
        return Result(len(prompt), tokens, text, FinishReason.LENGTH, records, stats)


class Loader:
    """Stands in for ``engine_factory.load_engine``."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.options: list[EngineOptions] = []
        self.regimes: list[Regime | None] = []

    def __call__(self, options: EngineOptions, regime: Regime | None = None) -> FakeEngine:
        self.options.append(options)
        self.regimes.append(regime)
        return self.engine
