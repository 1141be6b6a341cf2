"""A trained Llama as a transformers directory: ``config.json``, ``model.safetensors``, tokenizer files and a card.

Written beside its place and moved there when it is whole. What is written, ``models/load.py`` reads, and so does
transformers. A tokenizer may be left out for a model that ships with the package (``models/shipped.py``).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import RunError, UsageError
from outrider.text.tokenizer import Tokenizer
from outrider.training.small_model import LlamaConfig

CARD = "card.json"


def write_model(
    directory: Path,
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    card: Mapping[str, object],
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Write a model that ``--model`` and ``--draft-model`` load. An older one of ours at that place is replaced.

    Args:
        directory: made by this call; may exist when it is empty or was made by this function.
        tensors: under transformers' names; a tied output matrix is left out.
        card: how the model was made.

    Returns:
        Bytes of the weight file.

    Raises:
        UsageError: when there is something else at that place.
        RunError: when it cannot be stored; nothing is left behind.
    """
    check_place(directory)
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    try:
        part.mkdir(parents=True)
        save_file(stored, part / "model.safetensors", metadata={"format": "pt"})
        fields = transformers_config(config, tokenizer, str(dtype).removeprefix("torch."))
        (part / "config.json").write_text(json.dumps(fields, indent=1))
        (part / CARD).write_text(json.dumps(dict(card), indent=1))
        tokenizer.save(part)
        size = (part / "model.safetensors").stat().st_size
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(part, directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(f"cannot write {directory}: {error}; make room or choose another place") from None
    return size


def check_place(directory: Path) -> None:
    """Whether a model may be written to ``directory``: nothing there, an empty folder, or a model of ours.

    Raises:
        UsageError: when it holds anything else; training would end in an error.
    """
    if not directory.exists():
        return
    if not directory.is_dir() or (any(directory.iterdir()) and not (directory / CARD).is_file()):
        raise UsageError(f"{directory} exists and was not written by 'outrider train'; choose another --output")


def transformers_config(config: LlamaConfig, tokenizer: Tokenizer, dtype: str) -> dict[str, object]:
    """``config.json`` of transformers' ``LlamaForCausalLM``."""
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": sorted(tokenizer.eos_ids),
        "torch_dtype": dtype,
    }
    return {**fields, "rope_scaling": config.rope_scaling} if config.rope_scaling else fields
