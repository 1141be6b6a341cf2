"""Small targets for the tests of training data: the toy with and without a chat template, and a random decoder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from contracts.tiny_models import IMPLEMENTATIONS
from outrider.engine.loading import LoadedModel
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.models.toy import ToyModel
from outrider.text.tokenizer import Tokenizer
from outrider.text.toy_tokenizer import toy_tokenizer
from outrider.training.generate import Answer, Request

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}-{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a-{% endif %}"
)
END = 0
FEATURES = (1, 2, FINAL_HIDDEN)


def chat_tokenizer(template: str = CHAT) -> Tokenizer:
    """The toy's characters with a chat template: ``u-`` and ``a-`` begin a turn, the end token ends it."""
    return Tokenizer(toy_tokenizer().backend, eos_ids=[END], chat_template=template)


def toy_target(template: str | None = CHAT, sharpness: float = 2.0) -> LoadedModel:
    """The toy model, with a chat template or (``None``) without."""
    tokenizer = toy_tokenizer() if template is None else chat_tokenizer(template)
    return LoadedModel(ToyModel(tokenizer.vocab_size, sharpness=sharpness), tokenizer, "toy", torch.float64, "table")


def decoder(folder: Path) -> LanguageModel:
    """A random Llama of three blocks in float32; vocabulary 61."""
    return IMPLEMENTATIONS["llama"].build(folder)


def some_requests(count: int, vocab_size: int = 61, temperature: float = 0.0) -> list[Request]:
    """Prompts of different lengths, half of them at ``temperature``, half at 0."""
    prompts = [[(7 * i + 3 * j) % (vocab_size - 5) + 3 for j in range(1 + 3 * i % 11)] for i in range(count)]
    return [Request(i, prompt, temperature * (i % 2), 40 + i) for i, prompt in enumerate(prompts)]


def by_index(answers: Iterable[Answer]) -> dict[int, Answer]:
    """Answers by their request's index; each may be there once."""
    found: dict[int, Answer] = {}
    for answer in answers:
        assert answer.request.index not in found
        found[answer.request.index] = answer
    return found


def write_rows(path: Path, *rows: object) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
