"""How often each rank of each head is the target's own choice: what a static tree is made from.

Measured on feature files, against the target's best token, as greedy verification judges. The text above a guess is
the target's: for Hydra that is what an accepted path sees. ``trees/shapes/from_accuracy.py`` makes the tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.objectives.per_depth import PerDepthObjective


@dataclass(frozen=True, slots=True)
class HeadAccuracy:
    """Shares of positions.

    Attributes:
        shares: [heads][ranks].
        positions: [heads], where the head was judged.
    """

    shares: list[list[float]]
    positions: list[int]


@torch.inference_mode()
def measure_top_k(objective: PerDepthObjective, batches: Iterable[Batch], k: int) -> HeadAccuracy:
    """Top-``k`` accuracy, rank by rank, of every head of ``objective.network``.

    Positions whose best token the head cannot guess count as misses.

    Raises:
        ValueError: when no batch has a position to judge.
    """
    config = objective.network.config
    right = torch.zeros((config.steps, min(k, config.draft_vocab_size)), dtype=torch.int64)
    positions = torch.zeros(config.steps, dtype=torch.int64)
    for batch in batches:
        aligned = [align(batch, head, objective.network.spec.first_label) for head in range(config.steps)]
        for head, one in enumerate(aligned):
            best = one.at_teacher(batch.best)
            judged = one.mask & (best >= 0)
            logits = objective.head_logits(batch, head, judged, aligned)
            guesses = objective.teacher.ids[logits.topk(right.shape[1], dim=-1).indices]
            right[head] += (guesses == best[judged][:, None]).sum(dim=0).cpu()
            positions[head] += int(judged.sum())
    if not bool((positions > 0).all()):
        raise ValueError("no position to judge every head at: the answers are too short")
    return HeadAccuracy((right / positions[:, None]).tolist(), positions.tolist())
