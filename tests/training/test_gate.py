"""The overfit gate on small heads: learned by heart, then decoded as training foretold; and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.loading import LoadedModel
from outrider.errors import RunError
from outrider.heads.build import new_config
from outrider.heads.file import save_head
from outrider.heads.network import RecurrentNetwork
from outrider.heads.registry import network_class
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.models.decoder import Decoder
from outrider.training.batch import Batch
from outrider.training.gate import check_decoding, foretold_acceptance, overfit, top1
from outrider.training.generate import Answer, Request, answer_all
from outrider.training.objective import StepResult, simulated_acceptance
from outrider.training.objectives.unrolled import (
    Eagle3Objective,
    Eagle3Options,
    EagleObjective,
    EagleOptions,
    MtpObjective,
    MtpOptions,
    UnrolledObjective,
)
from training.tiny_llamas import letters
from training.tiny_targets import decoder

LENGTH = 24
LEARNING_RATE = 1e-2
PROMPTS = [[3 + (7 * i + 5 * j * j) % 50 for j in range(3 + i % 4)] for i in range(8)]


@dataclass(frozen=True)
class Texts:
    target: LanguageModel
    batch: Batch


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Eight greedy answers of a random decoder that is sure of them, two to a row."""
    target = decoder(tmp_path_factory.mktemp("target"))
    assert isinstance(target, Decoder)
    target.final_norm.mul_(8.0)
    requests = [Request(i, prompt) for i, prompt in enumerate(PROMPTS)]
    answers = list(answer_all(target, requests, (0, 1, 2, FINAL_HIDDEN), frozenset(), LENGTH))
    return Texts(target, packed(answers, per_row=2))


def packed(answers: list[Answer], per_row: int) -> Batch:
    rows = [answers[i : i + per_row] for i in range(0, len(answers), per_row)]
    size = (len(rows), max(sum(len(a.tokens) for a in row) for row in rows))
    tokens, answered = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
    documents, positions = torch.full(size, -1), torch.zeros(size, dtype=torch.int64)
    best, log_sum = torch.full(size, -1), torch.zeros(size)
    features = {name: torch.zeros((*size, state.shape[1])) for name, state in answers[0].features.items()}
    for b, row in enumerate(rows):
        start = 0
        for number, answer in enumerate(row):
            here = slice(start, start + len(answer.tokens))
            tokens[b, here] = torch.tensor(answer.tokens)
            answered[b, start + len(answer.request.prompt) : here.stop] = True
            documents[b, here], positions[b, here] = number, torch.arange(len(answer.tokens))
            best[b, here], log_sum[b, here] = answer.best.long(), answer.log_sum
            for name, state in answer.features.items():
                features[name][b, here] = state
            start = here.stop
    return Batch(tokens, answered, documents, positions, features, best, log_sum)


def make(method: str, target: LanguageModel, steps: int = 3) -> UnrolledObjective:
    network = network_class(method)(new_config(method, target))
    assert isinstance(network, RecurrentNetwork)
    cls, options = {
        "eagle3": (Eagle3Objective, Eagle3Options(steps=steps)),
        "eagle": (EagleObjective, EagleOptions(token_weight=1.0, noise=0.0)),
        "mtp": (MtpObjective, MtpOptions(steps=steps)),
    }[method]
    objective: UnrolledObjective = cls(network, target, options)
    objective.initialise(0)
    return objective


def engine_with(objective: UnrolledObjective, target: LanguageModel, folder: Path) -> Engine:
    """Drafts with the objective's head, from its file, as a chain."""
    path = folder / "head.safetensors"
    save_head(path, objective.network, dtype=torch.float32)
    loaded = LoadedModel(target, letters(target.vocab_size), "tiny", torch.float32, "auto")
    shape = f"chain:{objective.options.steps}"
    return Engine(EngineConfig(model="tiny", drafter=f"{objective.method}:{path}", shape=shape, adaptive=False), loaded)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp"])
def test_heads_learn_eight_texts_and_decode_them_as_foretold(method: str, texts: Texts, tmp_path: Path) -> None:
    objective = make(method, texts.target)
    steps = overfit(objective, texts.batch, learning_rate=LEARNING_RATE)
    assert top1(steps[0]) >= 0.95
    engine = engine_with(objective, texts.target, tmp_path)
    found = check_decoding(steps, texts.batch, engine, PROMPTS, LENGTH)
    tokens, positions = simulated_acceptance(steps)
    assert found.foretold == pytest.approx(tokens / positions, rel=0.15)
    assert found.decoded > (1.6 if method == "eagle" else 2.0)
    # a head that is not the one that training judged is noticed
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.mul_(torch.linspace(-1, 1, parameter.shape[-1]))
    spoilt = engine_with(objective, texts.target, tmp_path)
    with pytest.raises(RunError, match="where training foretells"):
        check_decoding(steps, texts.batch, spoilt, PROMPTS, LENGTH)


def test_a_head_that_learns_nothing_is_refused(texts: Texts) -> None:
    with pytest.raises(RunError, match=r"eagle3 learned .* of 8 texts by heart in 5 updates, not 95%"):
        overfit(make("eagle3", texts.target), texts.batch, updates=5, learning_rate=1e-6)


def test_texts_without_answers_are_refused(texts: Texts) -> None:
    batch = texts.batch
    nothing = Batch(
        batch.tokens,
        torch.zeros_like(batch.answers),
        batch.documents,
        batch.positions,
        batch.features,
        batch.best,
        batch.log_sum,
    )
    with pytest.raises(RunError, match="no token of these texts is supervised"):
        overfit(make("eagle3", texts.target), nothing, updates=1)


def test_foretold_acceptance_walks_from_step_to_step() -> None:
    # prompt of 2, answer of 7: steps start at token 2, each is the row before
    answers = torch.tensor([[False, False, *[True] * 7]])
    size = (1, 9)
    batch = Batch(torch.zeros(size), answers, torch.zeros(size), torch.arange(9)[None], {}, torch.zeros(size), None)  # type: ignore[arg-type]
    first = torch.tensor([[False, True, False, False, True, True, False, False, False]])
    second = torch.tensor([[False, True, True, False, True, False, False, False, False]])
    steps = [StepResult(torch.tensor(0.0), answers, correct) for correct in (first, second)]
    # token 2 (row 1): 2 guesses and the target's own, then token 5 (row 4): the same; token 8 is the last one
    assert foretold_acceptance(steps, batch) == 3.0
    # the text is over after one right guess: no token of the target's own follows it
    steps[0].correct[0, 6] = True
    steps[1].correct[0, 4] = False
    assert foretold_acceptance(steps, batch) == (3 + 2 + 1) / 3
    steps[1].correct[0, 4] = True
    steps[0].correct[0, 1] = False
    # token 2: 1, token 3: 1, token 4: 1, token 5: 3
    assert foretold_acceptance(steps, batch) == 1.5
