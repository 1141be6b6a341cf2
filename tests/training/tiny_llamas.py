"""Tiny Llamas with a letters tokenizer, and feature shards that one wrote, for the tests of whole-model training."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.config import EngineConfig
from outrider.engine.loading import LoadedModel, load_model
from outrider.models.base import FINAL_HIDDEN
from outrider.text.tokenizer import Tokenizer
from outrider.training.collect import target_fingerprint
from outrider.training.generate import Request, answer_all
from outrider.training.model_directory import write_model
from outrider.training.shards import shard_path, write_shard
from outrider.training.small_model import LlamaConfig, TrainableLlama

VOCABULARY = 40
FLOAT32 = EngineConfig(dtype="float32", weights="auto")


def letters(size: int = VOCABULARY) -> Tokenizer:
    """One token a letter-like spelling; id 0 ends a text."""
    texts = ["<|im_end|>", *(f"t{index}" for index in range(1, size))]
    backend = Backend(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="t1"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(backend, eos_ids=[0], template_names={"eos_token": "<|im_end|>"})


def tiny_config(**changes: object) -> LlamaConfig:
    """Two layers, grouped heads."""
    values: dict[str, object] = {
        "method": "small_model",
        "hidden_size": 32,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "features": (FINAL_HIDDEN,),
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "context_length": 256,
    }
    return LlamaConfig.model_validate(values | changes)


def random_llama(config: LlamaConfig, seed: int = 0, scale: float = 0.25) -> TrainableLlama:
    """Every parameter drawn, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    module = TrainableLlama(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            draws = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(1.0 + 0.2 * draws if "norm" in name else draws)
    return module


def save_llama(
    directory: Path, module: TrainableLlama, tokenizer: Tokenizer | None = None, card: dict[str, object] | None = None
) -> Path:
    """Write it in float32."""
    write_model(directory, module.config, module.state_dict(), tokenizer or letters(), card or {}, torch.float32)
    return directory


def target_on_disk(directory: Path, seed: int = 0) -> LoadedModel:
    """A target in float32, loaded from a directory of ours."""
    return load_model(str(save_llama(directory, random_llama(tiny_config(), seed))), FLOAT32)


def write_features(
    folder: Path, target: LoadedModel, answers: int = 8, length: int = 24, temperature: float = 0.0
) -> Path:
    """Shards of greedy answers to short prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, target.model.vocab_size, (answers, 6), generator=generator).tolist()
    requests = [Request(index, prompt, temperature, seed=index) for index, prompt in enumerate(prompts)]
    found = sorted(
        answer_all(target.model, requests, (FINAL_HIDDEN,), frozenset(), length), key=lambda a: a.request.index
    )
    write_shard(shard_path(folder, 0), found, target_fingerprint(target, (FINAL_HIDDEN,)))
    return folder
