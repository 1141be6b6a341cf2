"""The state of one request while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.base import DraftSession
from outrider.models.base import SequenceCache
from outrider.sampling.draw import RandomStream
from outrider.sampling.transform import LogitsPipeline
from outrider.schedules.stopping import StopRules
from outrider.types import FinishReason, StepRecord
from outrider.verifiers.base import Verifier


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's own log-probability of an output token (before sampling parameters), and its best tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RunningSequence:
    """One request: its text so far, its caches, its rules.

    ``cache`` covers prompt and output but for the last token, the root of the next tree.
    """

    prompt: Sequence[int]
    pipeline: LogitsPipeline
    random: RandomStream
    rules: StopRules
    verifier: Verifier
    cache: SequenceCache
    session: DraftSession
    is_adaptive: bool = True
    output: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Output tokens that may still follow."""
        return self.rules.max_tokens - len(self.output)

    def note_logprobs(self, rows: Tensor, tokens: Sequence[int]) -> None:
        """Record log-probabilities of ``tokens`` under raw logits ``rows`` [len(tokens), vocabulary], if asked for."""
        count = self.pipeline.params.logprobs
        if count is None:
            return
        table = torch.log_softmax(rows[:, : self.pipeline.vocab_size].double(), dim=-1)
        for row, token in zip(table, tokens, strict=True):
            values, best = torch.topk(row, count)
            top = tuple(zip(best.tolist(), values.tolist(), strict=True))
            self.logprobs.append(TokenLogprob(token, float(row[token]), top))
