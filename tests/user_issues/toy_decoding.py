"""What the cases of this folder share: plain decoding written out, watched models, output laws, a tiny decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.tiny_engines import Law
from models.tiny_checkpoints import LLAMA, write_pretrained
from outrider.engine.engine import Engine
from outrider.engine.result import Event
from outrider.models.base import FULL, Segment, SegmentOutput, Sublayers
from outrider.models.decoder import Decoder
from outrider.models.pretrained import PretrainedCheckpoint
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan
from outrider.sampling.params import SamplingParams
from outrider.schedules.sequence import RunningSequence


def plain_text(model: ToyModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Greedy decoding without engine or cache: the best token after the whole text, ``count`` times."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.logits_after(text).argmax()))
    return tuple(text[len(prompt) :])


@dataclass(frozen=True, slots=True)
class Call:
    """One segment of a forward pass: ``start`` entries lay in the cache before its ``rows``."""

    start: int
    rows: int
    logits: int
    chose_rows: bool


class Watched(ToyModel):
    """A toy model that notes what it was asked for."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.calls: list[Call] = []

    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        starts = [segment.cache.length + segment.cache.scratch for segment in segments]
        outputs = super().forward(segments, hidden, skip)
        for start, segment, output in zip(starts, segments, outputs, strict=True):
            rows = output.logits.shape[0]
            self.calls.append(Call(start, len(segment.tokens), rows, segment.logit_rows is not None))
        return outputs


def step_by_step(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, session: object = None
) -> Iterator[tuple[Event, RunningSequence]]:
    """The events of a stream, each with the request's state just after it."""
    stream = engine.stream(prompt, params, session)  # type: ignore[arg-type]
    sequence = stream.gi_frame.f_locals["active"].sequence  # type: ignore[attr-defined]
    for event in stream:
        yield event, sequence


def chain_law(rows: Sequence[Sequence[float]], first: int, length: int) -> Law:
    """The law of ``length`` tokens of a Markov chain after the token ``first``."""
    if length == 0:
        return {(): 1.0}
    tails = {token: chain_law(rows, token, length - 1) for token, mass in enumerate(rows[first]) if mass > 0}
    return {(token, *tail): rows[first][token] * mass for token, law in tails.items() for tail, mass in law.items()}


def tiny_decoder(
    directory: Path, dtype: torch.dtype = torch.float32, form: WeightFormat = WeightFormat.AUTO, **changes: object
) -> Decoder:
    """Our own decoder with random weights, 48 tokens."""
    write_pretrained(directory, {**LLAMA, **changes})
    plan = WeightPlan(dtype, form, torch.device("cpu"))
    return Decoder(PretrainedCheckpoint(directory), plan)
