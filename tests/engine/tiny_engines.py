"""Whole engines on float64 toy models: what every suite of the engine is run on. No download, no clock, no network.

``combinations`` reads the registry, so that a new part is covered by every suite here without an edit.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations as pairs
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from torch import Tensor

from outrider.audit.enumeration import EnumeratingStream, output_law
from outrider.config import EngineConfig
from outrider.engine.build import draft_models_needed, plan_parts
from outrider.engine.engine import Engine
from outrider.engine.loading import LoadedModel
from outrider.engine.registry import DRAFTERS, SHAPES, VERIFIERS, load_class
from outrider.errors import OutriderError
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.types import ProposalKind, Regime

Law = dict[tuple[int, ...], float]
"""Output tokens -> probability."""

END = "<|endoftext|>"
LETTERS = string.ascii_letters


def letters_tokenizer(size: int, with_end: bool = True) -> Tokenizer:
    """``size`` tokens of one letter each; id 0 is the end token unless told otherwise."""
    texts = [END, *LETTERS][:size] if with_end else list(LETTERS[:size])
    backend = Backend(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token=texts[-1]))
    backend.decoder = decoders.Fuse()
    if with_end:
        backend.add_special_tokens([END])
    return Tokenizer(backend, eos_ids=[0] if with_end else [])


def loaded(model: ToyModel, tokenizer: Tokenizer | None = None, name: str = "tiny") -> LoadedModel:
    """A toy model as the engine wants it."""
    return LoadedModel(model, tokenizer or letters_tokenizer(model.vocab_size), name, torch.float64, "table")


def build_engine(
    drafter: str = "none",
    shape: str | None = None,
    proposal: ProposalKind | None = None,
    verifier: str | None = None,
    *,
    target: ToyModel | None = None,
    draft: ToyModel | None = None,
    tokenizer: Tokenizer | None = None,
    adaptive: bool = False,
    max_nodes: int | None = None,
    lossy: bool = False,
) -> Engine:
    """An engine from parts. The default target is a Markov chain of order 2: its greedy text runs into loops."""
    target = target or ToyModel(vocab_size=12, order=2, seed=3)
    needed = draft_models_needed(EngineConfig(drafter=drafter))
    if needed and draft is None:
        same = (target.vocab_size, target.context_length, target.order, target.sharpness, target.seed)
        draft = ToyModel(*same, noise=0.4)
    config = EngineConfig(
        model="tiny",
        drafter=drafter,
        shape=shape,
        proposal=proposal,
        verifier=verifier,
        draft_model=",".join(["tiny-draft"] * needed) or None,
        adaptive=adaptive,
        max_nodes=max_nodes,
        lossy=lossy,
    )
    tokenizer = tokenizer or letters_tokenizer(target.vocab_size)
    drafts = [loaded(draft, tokenizer, "tiny-draft")] * needed if draft is not None else []
    return Engine(config, loaded(target, tokenizer), drafts)


@dataclass(frozen=True)
class Combination:
    """One legal set of parts for a regime."""

    drafter: str
    shape: str
    proposal: ProposalKind
    verifier: str

    def __str__(self) -> str:
        return f"{self.drafter}-{self.shape}-{self.proposal.value}-{self.verifier}"

    def engine(self, **options: object) -> Engine:
        """``build_engine`` with these parts."""
        return build_engine(self.drafter, self.shape, self.proposal, self.verifier, **options)  # type: ignore[arg-type]


def _untrained_heads() -> dict[str, tuple[str, ...]]:
    """Drafters that may take a trained head, with one that nobody trained: none ships for a toy."""
    fields = {name: load_class("drafter", name).Options.model_fields.get("head") for name in DRAFTERS}
    heads = {name: (f"{name}:head=random",) for name, field in fields.items() if field is not None}
    is_needed = {name: field is not None and field.default == "auto" for name, field in fields.items()}
    return {name: variant if is_needed[name] else (name, *variant) for name, variant in heads.items()}


VARIANTS = {"widths": ("widths:2,2,1",), "chain": ("chain:5,stop=0.1",), "replay": ("replay:0.7",)}
VARIANTS["hybrid"] = ("hybrid", "hybrid:(layer_skip:2@chain:3,stop=0.4)+ngram")  # a model that is silent at times
VARIANTS |= _untrained_heads()
"""Options tried in place of a part's defaults."""


@cache
def combinations(regime: Regime) -> list[Combination]:
    """Legal drafter x shape x proposal x lossless verifier combinations of the registry that a toy model can run.

    Not all of them, there are thousands: enough that every legal pair of parts occurs in one, and every legal triple of
    shape, proposal and verifier.
    """
    candidates = list(_candidates())
    random.Random(0).shuffle(candidates)
    covered: set[tuple[object, ...]] = set()
    chosen = []
    for candidate in candidates:
        parts = (candidate.drafter, candidate.shape, candidate.proposal, candidate.verifier)
        new = {*pairs(enumerate(parts), 2), parts[1:]} - covered
        if new and _is_legal(candidate, regime):
            covered |= new
            chosen.append(candidate)
    return sorted(chosen, key=str)


def _candidates() -> Iterator[Combination]:
    lossless = [name for name in VERIFIERS if not load_class("verifier", name).lossy]
    for drafter, shape in product(_variants(DRAFTERS), _variants(SHAPES)):
        for proposal, verifier in product(ProposalKind, lossless):
            yield Combination(drafter, shape, proposal, verifier)


def _variants(names: Iterable[str]) -> list[str]:
    return [variant for name in names for variant in VARIANTS.get(name, (name,))]


def _is_legal(combination: Combination, regime: Regime) -> bool:
    try:
        needed = draft_models_needed(EngineConfig(drafter=combination.drafter))
        config = EngineConfig(
            drafter=combination.drafter,
            shape=combination.shape,
            proposal=combination.proposal,
            verifier=combination.verifier,
            draft_model=",".join(["tiny-draft"] * needed) or None,
        )
        plan_parts(config, regime)
        combination.engine()
    except OutriderError:
        return False
    return True


class ScriptModel(ToyModel):
    """Says ``script`` after a prompt of ``prompt_length`` tokens, whatever was said."""

    def __init__(self, script: Sequence[int], prompt_length: int, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size)
        self.script = list(script)
        self.prompt_length = prompt_length

    def _logits(self, view: object, skip: frozenset[int] = frozenset()) -> Tensor:
        index = len(view) - self.prompt_length  # type: ignore[arg-type]
        logits = torch.zeros(self.vocab_size, dtype=torch.float64)
        logits[self.script[index % len(self.script)]] = 12.0
        return logits


def engine_law(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> tuple[Law, int]:
    """The exact law of a request's output over all random outcomes, and the most guesses that one run accepted."""
    accepted = 0

    def run(stream: EnumeratingStream) -> tuple[int, ...]:
        nonlocal accepted
        monkeypatch.setattr("outrider.engine.engine.SeededStream", lambda seed: stream)
        result = engine.generate(prompt, params)
        accepted = max(accepted, result.stats.num_accepted_tokens)
        return result.tokens

    return output_law(run), accepted


def distance(one: Law, other: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())


def distance_from_plain(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> tuple[float, int]:
    """Total variation between the engine's law and plain decoding's, and the most guesses that one run accepted."""
    found, accepted = engine_law(monkeypatch, engine, prompt, params)
    expected, _ = engine_law(monkeypatch, engine.plain(), prompt, params)
    return distance(found, expected), accepted


def random_prompts(count: int, vocab_size: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    """Ragged prompts without the end token."""
    source = random.Random(seed)
    return [[source.randrange(1, vocab_size) for _ in range(source.randint(1, longest))] for _ in range(count)]
