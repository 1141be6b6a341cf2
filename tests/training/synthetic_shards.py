"""Feature shards of a counting language, and the smallest objective that can learn it."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from outrider.config import EngineConfig
from outrider.engine.loading import load_model
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.collect import target_fingerprint
from outrider.training.generate import Answer, Request
from outrider.training.objective import BatchResult, Objective, StepResult
from outrider.training.shards import Fingerprint, shard_path, write_shard

VOCABULARY, HIDDEN = 65, 8
FEATURES = (0, 1, 2, "final")


def toy_fingerprint(features: tuple[int | str, ...] = FEATURES) -> Fingerprint:
    """What ``outrider train collect --model toy`` would write."""
    return target_fingerprint(load_model("toy", EngineConfig(model="toy")), features)


def following(token: int) -> int:
    """The counting language's only continuation."""
    return (token + 3) % VOCABULARY


def answer(index: int, prompt: list[int], length: int, features: tuple[int | str, ...] = FEATURES) -> Answer:
    """A prompt and ``length`` tokens counted on from its last one; hidden states are functions of the token."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(following(tokens[-1]))
    table = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(5)).double()
    best = torch.full((len(tokens),), -1, dtype=torch.int32)
    if length:
        best[len(prompt) - 1 : -1] = torch.tensor(tokens[len(prompt) :], dtype=torch.int32)
    hidden = {name: table[torch.tensor(tokens)] for name in features}
    return Answer(Request(index, prompt), tokens, hidden, best, torch.full((len(tokens),), 4.0), True)


def write_data(
    folder: Path,
    count: int = 60,
    shards: int = 3,
    longest: int = 20,
    fingerprint: Fingerprint | None = None,
    seed: int = 0,
    is_answered: bool = True,
) -> list[Answer]:
    """``count`` answers with different prompts over ``shards`` files."""
    fingerprint = fingerprint or toy_fingerprint()
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for index in range(count):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(4, 8))]
        length = chance.randint(1, longest) if is_answered else 0
        made.append(answer(index, prompt, length, fingerprint.features))
    for number in range(shards):
        write_shard(shard_path(folder, number), made[number::shards], fingerprint)
    return made


class CountingObjective(Objective):
    """A linear map from the final state to the next token, with noise from torch's own generator in training."""

    method = "counting"
    features = ("final",)

    def __init__(self, seed: int = 0, noise: float = 0.05) -> None:
        torch.manual_seed(seed)
        self.module: nn.Linear = nn.Linear(HIDDEN, VOCABULARY)
        self.noise = noise

    def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
        one = align(batch, 0, 1)
        states = batch.features["final"]
        if is_training:
            states = states + self.noise * torch.rand_like(states)
        logits = self.module(states[one.mask]).float()
        labels = one.at_teacher(batch.best)[one.mask]
        loss = F.cross_entropy(logits, labels)
        correct = torch.zeros_like(one.mask)
        correct[one.mask] = logits.argmax(-1) == labels
        overlap = float("nan") if is_training else float(one.mask.sum()) * 0.5
        return BatchResult(loss, [StepResult(loss, one.mask, correct, overlap)])
