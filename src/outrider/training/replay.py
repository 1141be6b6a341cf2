"""The hidden states of texts that are known already: one pass over many answers together instead of decoding them.

The states are those of decoding, up to the rounding of products over more rows. Knows nothing of text and of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.models.base import PREFILL_ROWS, LanguageModel, Segment, SegmentOutput, SequenceCache
from outrider.training.generate import Answer, Feature, Request, new_answer


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text that a target wrote before.

    Attributes:
        request: index, prompt and temperature of it (its seed is not known any more).
        tokens: prompt and answer, [n].
        is_finished: whether the answer ended by itself.
    """

    request: Request
    tokens: list[int]
    is_finished: bool


@dataclass(slots=True, eq=False)
class _Reading:
    recorded: Recorded
    cache: SequenceCache
    rows: dict[Feature, list[Tensor]] = field(default_factory=dict)
    best: list[Tensor] = field(default_factory=list)
    log_sum: list[Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Rows to evaluate: the last token predicts nothing."""
        return len(self.recorded.tokens) - 1 - self.cache.length


@torch.inference_mode()
def replay_all(
    model: LanguageModel, recorded: Iterable[Recorded], features: Sequence[Feature], rows: int = PREFILL_ROWS
) -> Iterator[Answer]:
    """Evaluate ``recorded``, in their order.

    Args:
        model: the target that wrote them.
        recorded: each with at least one token of an answer.
        features: names of the hidden states to keep.
        rows: tokens evaluated together at most.
    """
    waiting = iter(recorded)
    reading: list[_Reading] = []
    while True:
        while sum(one.left for one in reading) < rows and (text := next(waiting, None)) is not None:
            reading.append(_Reading(text, model.new_cache()))
        if not reading:
            return
        room, segments = rows, []
        for one in reading:
            if room > 0:
                segments.append(_segment(one, min(room, one.left)))
                room -= len(segments[-1].tokens)
        outputs = model.forward(segments, features)
        for one, segment, output in zip(reading, segments, outputs, strict=False):
            _keep(one, len(segment.tokens), output)
        while reading and not reading[0].left:
            yield _answer(reading.pop(0))


def _segment(one: _Reading, count: int) -> Segment:
    start, first = one.cache.length, len(one.recorded.request.prompt) - 1
    wanted = range(max(0, first - start), count)
    return Segment(one.cache, one.recorded.tokens[start : start + count], logit_rows=wanted)


def _keep(one: _Reading, count: int, output: SegmentOutput) -> None:
    one.cache.commit(range(count))
    for name, state in output.hidden.items():
        one.rows.setdefault(name, []).append(state.clone())
    one.best.append(output.logits.argmax(dim=-1).to("cpu", torch.int32))
    one.log_sum.append(torch.logsumexp(output.logits.float(), dim=-1).cpu())


def _answer(one: _Reading) -> Answer:
    text = one.recorded
    return new_answer(
        text.request, text.tokens, one.rows, torch.cat(one.best), torch.cat(one.log_sum), text.is_finished
    )
