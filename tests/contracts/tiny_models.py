"""Tiny random models of every kind that implements ``LanguageModel``, for the contract suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models.base import LanguageModel
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.hf import TransformersModel
from outrider.models.pretrained import PretrainedCheckpoint
from outrider.models.toy import ToyModel
from outrider.models.weights import WeightFormat, WeightPlan

WINDOW = 6
PLAN = WeightPlan(torch.float32, WeightFormat.AUTO, torch.device("cpu"))

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_OPTIONS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"head_dim": 6},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW, "layer_types": _KINDS, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _KINDS, "query_pre_attn_scalar": 8},
    "gpt_neox": {},
    "gpt2": {},
}


@dataclass(frozen=True, slots=True)
class Implementation:
    """``build`` makes the model in an empty directory; ``drops_entries``: its cache forgets what left the window."""

    build: Callable[[Path], LanguageModel]
    drops_entries: bool = False


def save(family: str, directory: Path) -> Path:
    """A random transformers model of ``family`` on disk, its norms and biases perturbed so that none is trivial."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**_SHAPE, **_OPTIONS[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(directory)
    return directory


def _decoder(family: str) -> Callable[[Path], LanguageModel]:
    return lambda directory: Decoder(PretrainedCheckpoint(save(family, directory)), PLAN)


def _fallback(family: str) -> Callable[[Path], LanguageModel]:
    return lambda directory: TransformersModel.from_directory(save(family, directory), torch.float32, PLAN.device)


IMPLEMENTATIONS = {
    "toy": Implementation(lambda _: ToyModel(vocab_size=61)),
    "toy_window": Implementation(lambda _: ToyModel(vocab_size=61, window=WINDOW), drops_entries=True),
    "llama": Implementation(_decoder("llama")),
    "mistral": Implementation(_decoder("mistral"), drops_entries=True),
    "qwen2": Implementation(_decoder("qwen2")),
    "qwen3": Implementation(_decoder("qwen3")),
    "gemma2": Implementation(_decoder("gemma2"), drops_entries=True),
    "gemma3": Implementation(_decoder("gemma3_text"), drops_entries=True),
    "hf_gpt2": Implementation(_fallback("gpt2")),
    "hf_gpt_neox": Implementation(_fallback("gpt_neox")),
    "hf_mistral": Implementation(_fallback("mistral")),
    "hf_gemma3": Implementation(_fallback("gemma3_text")),
}


class FirstLayers:
    """A checkpoint cut after ``count`` layers: the reference for early exits."""

    def __init__(self, whole: PretrainedCheckpoint, count: int) -> None:
        self.config: DecoderConfig = replace(whole.config, num_layers=count, windows=whole.config.windows[:count])
        self.source = whole.source
        self.names = whole.names
        self.tensor = whole.tensor
        self.int4 = whole.int4
