"""The fine test: the production verifier, replayed many times on stored real-model distributions with a known answer.

Each replay draws the children anew as the shape would (the law holds over draws of the tree, a fixed one has none) and
asks the verifier for its verdict; the first output token must follow the stored p. No forward is run, so 200,000
replays take seconds, enough for a bias of 1% total variation. Two chi-square tests look at each step: one at single
tokens, one at groups of tokens with similar q / p, the direction in which a wrong acceptance rule errs. Their sums over
all steps see what every step shares. p-values are corrected with Holm's method. Knows no model; the first token alone
is tested, deeper levels are the exact part's business (``audit/law.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.audit.significance import (
    FloatArray,
    IntArray,
    Significance,
    equal_mass_groups,
    goodness_of_fit,
    summed,
)
from outrider.audit.statistical import LawTest, correct, seed_of
from outrider.audit.stored_step import StoredStep
from outrider.sampling.draw import SeededStream
from outrider.verifiers.base import Verifier

GROUPS = 8
_STRIDE = 4
"""Positions between two replays of one random stream: a replay of depth 1 uses two of them."""
_REPORT_EVERY = 1_000

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class ReplayRow:
    """One stored step, or all of them together (``prompt`` and ``position`` ``None``).

    ``distance`` is the total variation between observed frequencies and p, ``chance`` what it is on average for a
    correct verifier at this number of replays.
    """

    prompt: int | None
    position: int | None
    kind: str
    children: int
    replays: int
    accepted: int
    distance: float
    chance: float
    tests: list[LawTest] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _StoredTarget:
    """p at the root. Below an accepted child the law of the first token does not depend on the answer; it is p too."""

    p: Tensor

    def probabilities(self, node: int) -> Tensor:
        return self.p

    def greedy_token(self, node: int) -> int:
        return int(self.p.argmax())


def replay_audit(
    steps: Sequence[StoredStep], verifier: Verifier, replays: int, seed: int, progress: Progress | None = None
) -> list[ReplayRow]:
    """Replay ``verifier`` on ``steps``, ``replays`` times in all, shared equally; the last row is all steps together.

    Args:
        steps: from ``capture_steps``; their labels are the vocabulary.
        verifier: the rule to test.
        replays: at least one for each step.
        seed: every draw is a function of it.
        progress: called with (replays done, replays in all).
    """
    share = max(1, replays // max(1, len(steps)))
    rows, found = [], []
    for index, step in enumerate(steps):
        report = None
        if progress is not None:
            report = partial(_report, progress, index * share, share * len(steps))
        counts, accepted = count_first_tokens(step, verifier, share, seed_of(seed, index), report)
        p = step.p.numpy()
        fits = _fits(step, counts, p)
        found.append(fits)
        tests = [LawTest(name, fit) for name, fit in fits.items() if fit is not None]
        distance, chance = _distances(counts, p)
        where = (step.prompt, step.position, step.kind.value, step.children)
        rows.append(ReplayRow(*where, share, accepted, distance, chance, tests))
    if sum(bool(row.tests) for row in rows) > 1:
        rows.append(_together(rows, {name: summed(fits[name] for fits in found) for name in found[0]}))
    correct([test for row in rows for test in row.tests])
    return rows


@torch.inference_mode()
def count_first_tokens(
    step: StoredStep, verifier: Verifier, replays: int, seed: int, progress: Callable[[int], None] | None = None
) -> tuple[IntArray, int]:
    """How often each label came first, [labels], and how often a child was accepted, in ``replays`` replays."""
    random = SeededStream(seed)
    target = _StoredTarget(step.p)
    first = np.zeros(replays, dtype=np.int64)
    accepted = 0
    for index in range(replays):
        position = 1 + _STRIDE * index
        tree = step.draw(position, random)
        verdict = verifier.verify(tree, target, random, position)
        accepted += bool(verdict.path)
        first[index] = tree.tokens[verdict.path[0]] if verdict.path else verdict.next_token
        if progress is not None and ((index + 1) % _REPORT_EVERY == 0 or index + 1 == replays):
            progress(index + 1)
    return np.bincount(first, minlength=len(step.p)), accepted


def _fits(step: StoredStep, counts: IntArray, p: FloatArray) -> dict[str, Significance | None]:
    ratio = step.proposal.numpy() / np.maximum(p, np.finfo(np.float64).tiny)
    group = equal_mass_groups(ratio, p, GROUPS)
    sums = np.bincount(group, counts).astype(np.int64)
    return {
        "tokens": goodness_of_fit(counts, p),
        "by q / p": goodness_of_fit(sums, np.bincount(group, p).astype(np.float64)),
    }


def _distances(counts: IntArray, p: FloatArray) -> tuple[float, float]:
    """Total variation between observed frequencies and p, and its mean under p (each cell's normal approximation)."""
    total = int(counts.sum())
    observed = 0.5 * float(np.abs(counts / total - p / p.sum()).sum())
    return observed, float(np.sqrt(p * (1.0 - p).clip(min=0.0) / (2.0 * np.pi * total)).sum())


def _together(rows: Sequence[ReplayRow], sums: dict[str, Significance | None]) -> ReplayRow:
    tests = [LawTest(name, test) for name, test in sums.items() if test is not None]
    kinds = sorted({row.kind for row in rows})
    return ReplayRow(
        None,
        None,
        ", ".join(kinds),
        sum(row.children for row in rows),
        sum(row.replays for row in rows),
        sum(row.accepted for row in rows),
        float(np.mean([row.distance for row in rows])),
        float(np.mean([row.chance for row in rows])),
        tests,
    )


def _report(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)
