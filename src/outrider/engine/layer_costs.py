"""What a model's sublayers cost, measured, and what a draft that leaves some of them out can gain.

The expected speed is Leviathan et al. 2023's (arXiv 2211.17192, theorem 3.8) with measured pass times in place of the
assumption that a pass over several rows costs as much as over one. Knows nothing of which sublayers to choose.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from outrider.models.base import FULL, LanguageModel, Segment, Sublayers

LONGEST_CHAIN = 8
_CONTEXT = 128
_Case = tuple[int, Sublayers]
_REPEATS = 40
_LONG_EVERY = 4
"""Passes over several rows, whose seconds matter less, are timed in every fourth round."""


@dataclass(frozen=True, slots=True)
class SublayerCosts:
    """Seconds of a pass over one row behind a short text, by part, and of whole passes over more rows.

    Attributes:
        attention, mlp: one sublayer of each kind.
        rest: what no skipping saves: embedding, final norm, head, overhead.
        passes: ``passes[n - 1]`` is the whole model over n rows, n from 1 to ``LONGEST_CHAIN + 1``.
    """

    attention: float
    mlp: float
    rest: float
    passes: tuple[float, ...]

    def draft(self, skip: Sublayers, num_layers: int) -> float:
        """Seconds of a draft pass over one row without the sublayers ``skip``."""
        attention = num_layers - sum(1 for sublayer in skip if sublayer % 2 == 0)
        mlp = num_layers - sum(1 for sublayer in skip if sublayer % 2 == 1)
        return self.rest + attention * self.attention + mlp * self.mlp

    def best_chain(self, matchness: float, draft: float) -> tuple[float, int]:
        """(expected speed over plain decoding, length of the chain that gives it).

        Args:
            matchness: probability that a guess is accepted, each independently.
            draft: seconds of one draft pass; a chain of g guesses takes g of them.
        """
        speeds = [
            (expected_tokens(matchness, length) * self.passes[0] / (length * draft + self.passes[length]), -length)
            for length in range(1, len(self.passes))
        ]
        speed, negative = max(speeds)
        return speed, -negative


def expected_tokens(rate: float, length: int) -> float:
    """Tokens per step, bonus included, of a chain of ``length`` guesses accepted with probability ``rate`` each."""
    return float(sum(rate**depth for depth in range(length + 1)))


@torch.inference_mode()
def measure_costs(model: LanguageModel, token: int = 0) -> SublayerCosts:
    """Time passes of ``model`` (about 260 of them), with the threads that torch has now; the fastest of each kind.

    Whole passes, passes without any attention, without any MLP, and with one MLP alone alternate, so that a busy
    machine disturbs all of them alike; parts are differences of the last three and never below zero.
    """
    cache = model.new_cache()
    context = min(_CONTEXT, model.context_length - LONGEST_CHAIN - 1)
    if context > 0:
        model.forward([Segment(cache, [token] * context, logit_rows=())])
        cache.commit(range(context))
    layers = model.num_layers
    no_attention, no_mlp = frozenset(range(0, 2 * layers, 2)), frozenset(range(1, 2 * layers, 2))
    one_mlp = frozenset(range(2 * layers)) - {1}
    parts: list[_Case] = [(1, no_attention), (1, no_mlp), (1, one_mlp), (1, FULL)]
    longer: list[_Case] = [(rows, FULL) for rows in range(2, LONGEST_CHAIN + 2)]
    fastest: dict[_Case, float] = {}
    for repeat in range(-_LONG_EVERY, _REPEATS):  # the first rounds warm up
        for rows, skip in parts if repeat % _LONG_EVERY else [*parts, *longer]:
            seconds = _time(model, Segment(cache, [token] * rows), skip)
            if repeat >= 0:
                fastest[rows, skip] = min(seconds, fastest.get((rows, skip), seconds))
    alone = fastest[1, one_mlp]
    mlp = max(0.0, fastest[1, no_attention] - alone) / max(1, layers - 1)
    rest = max(0.0, alone - mlp)
    attention = max(0.0, fastest[1, no_mlp] - rest) / layers
    return SublayerCosts(attention, mlp, rest, tuple(fastest[rows, FULL] for rows in range(1, LONGEST_CHAIN + 2)))


def _time(model: LanguageModel, segment: Segment, skip: Sublayers) -> float:
    with segment.cache.speculation():
        _synchronize(model)
        start = time.perf_counter()
        model.forward([segment], skip=skip)
        _synchronize(model)
        return time.perf_counter() - start


def _synchronize(model: LanguageModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
