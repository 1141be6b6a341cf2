"""The overfit gate: a head must be able to learn a few texts by heart, and then to draft them as training said.

Training that counts on other positions than drafting uses (a shift, a mask, a template) shows a high accuracy and is
worth nothing when it decodes (EAGLE#264, SpecForge#455). So the same texts are decoded, and the tokens kept per step
must be those that training foretells. Knows nothing of what the head is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.engine import Engine
from outrider.errors import RunError
from outrider.sampling.params import SamplingParams
from outrider.training.batch import Batch
from outrider.training.objective import Objective, StepResult

CHECK_EVERY = 20
"""Updates between two looks at the accuracy."""


def overfit(
    objective: Objective, batch: Batch, updates: int = 600, learning_rate: float = 3e-3, least: float = 0.95
) -> list[StepResult]:
    """Train on one batch until the first step's best token is right at ``least`` of the supervised positions.

    Returns:
        The steps' results in evaluation, at the end.

    Raises:
        RunError: when ``updates`` were not enough, saying how far it came, or nothing is supervised.
    """
    optimizer = torch.optim.AdamW(objective.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    share = 0.0
    for update in range(updates + 1):
        if update % CHECK_EVERY == 0 or update == updates:
            steps = _evaluated(objective, batch)
            share = top1(steps[0])
            if share >= least:
                return steps
        if update < updates:
            loss = objective.evaluate(batch, is_training=True, progress=update / updates).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
            optimizer.step()
    raise RunError(
        f"{objective.method} learned {share:.1%} of the first guesses of {_texts(batch)} texts by heart in {updates} "
        f"updates, not {least:.0%}; a head that cannot do that has a wrong shift, mask or learning rate"
    )


def top1(step: StepResult) -> float:
    """Share of a step's supervised positions where the head's best token is the target's.

    Raises:
        RunError: when there are none.
    """
    count = int(step.mask.sum())
    if not count:
        raise RunError("no token of these texts is supervised: check the answers' mask and the chat template")
    return int(step.correct.sum()) / count


@torch.no_grad()
def _evaluated(objective: Objective, batch: Batch) -> list[StepResult]:
    return objective.evaluate(batch, is_training=False, progress=1.0).steps


def _texts(batch: Batch) -> int:
    """Documents of a batch."""
    return int((batch.documents.max(dim=1).values + 1).sum())


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens kept per drafting step, the target's own included: what training foretells, and what decoding did."""

    foretold: float
    decoded: float


def foretold_acceptance(steps: Sequence[StepResult], batch: Batch) -> float:
    """Mean tokens kept per step when a chain of ``len(steps)`` guesses walks through the batch's answers.

    ``simulated_acceptance`` starts at every position; decoding only where the last step ended, as here. A step at
    token r of a text is row r - 1: its pair is the features that predicted r, and r.
    """
    runs = torch.stack([step.correct for step in steps]).int().cumprod(dim=0).sum(dim=0).tolist()
    kept = count = 0
    for row, answered in enumerate(batch.answers.tolist()):
        documents, at = batch.documents[row].tolist(), 1
        while at + 1 < len(answered):
            if not (answered[at] and documents[at] == documents[at + 1]):
                at += 1
                continue
            guesses = runs[row][at - 1]
            end = at + guesses + 1  # where the target's own token lies, unless the text is over
            step = guesses + (end < len(answered) and documents[end] == documents[at])
            kept += step
            count += 1
            at += step
    return kept / count if count else 1.0


def check_decoding(
    steps: Sequence[StepResult],
    batch: Batch,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    tolerance: float = 0.05,
) -> Acceptance:
    """Decode the batch's texts again and compare.

    Args:
        steps: of ``batch`` in evaluation, after training.
        batch: greedy answers of the engine's target to ``prompts``.
        engine: drafts with the trained head, as a chain of ``len(steps)`` guesses.
        max_new_tokens: with which the answers were made.
        tolerance: largest relative difference.

    Raises:
        RunError: when decoding keeps another number of tokens than training foretells.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    results = [engine.generate(list(prompt), params).stats for prompt in prompts]
    drafts = sum(stats.num_drafts for stats in results)
    kept = sum(stats.mean_acceptance_length * stats.num_drafts for stats in results)
    found = Acceptance(foretold_acceptance(steps, batch), kept / drafts if drafts else 1.0)
    if abs(found.decoded - found.foretold) > tolerance * found.foretold:
        raise RunError(
            f"decoding keeps {found.decoded:.3f} tokens a step where training foretells {found.foretold:.3f}; the "
            "drafter does not see what training saw: check shifts, positions, features and the chat template"
        )
    return found
