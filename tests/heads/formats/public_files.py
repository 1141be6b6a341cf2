"""Tiny random heads in the exact layouts of other projects, made without our writers: tensors and configurations.

Sizes: hidden 16, 4 query and 2 key heads of 4, intermediate 24, vocabulary 40, draft vocabulary 12, 10 target layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.heads.formats.base import TargetFacts

H, HEADS, KV_HEADS, DIM, WIDE, V, VD, LAYERS = 16, 4, 2, 4, 24, 40, 12, 10

Tensors = dict[str, Tensor]
Config = dict[str, Any]

DRAFT_IDS = torch.tensor([0, 1, 3, 4, 8, 9, 15, 20, 21, 30, 38, 39])
LLAMA: Config = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "pad_token_id": 0,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that bfloat16 holds exactly, so that every format stores them without loss."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def target_facts(**changed: Any) -> TargetFacts:
    """A target with these sizes and random matrices."""
    facts: dict[str, Any] = {
        "name": "tiny",
        "hidden_size": H,
        "vocab_size": V,
        "num_layers": LAYERS,
        "context_length": 4096,
        "fingerprint": "f" * 24,
        "tokenizer": "t",
        "embedding": lambda: random(V, H, seed=1),
        "output": lambda: random(V, H, seed=2),
    }
    return TargetFacts(**{**facts, **changed})


def llama_layer(prefix: str, inputs: int) -> Tensors:
    """A decoder layer without its first norm; its queries, keys and values read ``inputs``."""
    return {
        f"{prefix}self_attn.q_proj.weight": random(HEADS * DIM, inputs, seed=3),
        f"{prefix}self_attn.k_proj.weight": random(KV_HEADS * DIM, inputs, seed=4),
        f"{prefix}self_attn.v_proj.weight": random(KV_HEADS * DIM, inputs, seed=5),
        f"{prefix}self_attn.o_proj.weight": random(H, HEADS * DIM, seed=6),
        f"{prefix}post_attention_layernorm.weight": random(H, seed=7),
        f"{prefix}mlp.gate_proj.weight": random(WIDE, H, seed=8),
        f"{prefix}mlp.up_proj.weight": random(WIDE, H, seed=9),
        f"{prefix}mlp.down_proj.weight": random(H, WIDE, seed=10),
    }


def maps() -> Tensors:
    """``d2t`` and ``t2d`` of ``DRAFT_IDS``."""
    chosen = torch.zeros(V, dtype=torch.bool)
    chosen[DRAFT_IDS] = True
    return {"d2t": DRAFT_IDS - torch.arange(VD), "t2d": chosen}


def eagle3(prefix: str = "midlayer.", draft: int = VD) -> tuple[Tensors, Config]:
    """The authors' layout (``yuhuili/EAGLE3-*``); ``layers.0.`` is speculators'."""
    tensors = {
        "fc.weight": random(H, 3 * H, seed=11),
        f"{prefix}input_layernorm.weight": random(H, seed=12),
        f"{prefix}hidden_norm.weight": random(H, seed=13),
        **llama_layer(prefix, 2 * H),
        "norm.weight": random(H, seed=14),
        "lm_head.weight": random(draft, H, seed=15),
    }
    if draft < V:
        tensors |= maps()
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": draft, "tie_word_embeddings": False}
    return tensors, config


def sglang() -> tuple[Tensors, Config]:
    """SpecForge's export for SGLang; explicit ids are outputs of blocks."""
    tensors, config = eagle3()
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}
    return tensors, {**config, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}


def speculators(kind: str = "eagle3", **changed: Any) -> tuple[Tensors, Config]:
    """An eagle3 directory of speculators, with a trained-along copy of the target's embedding."""
    tensors, _ = eagle3("layers.0.")
    tensors["embed_tokens.weight"] = random(V, H, seed=1)
    serving = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "draft_vocab_size": VD,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "transformer_layer_config": dict(LLAMA),
        "speculators_config": serving,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return tensors, {**config, **changed}


def peagle(layers: int = 2) -> tuple[Tensors, Config]:
    """A P-EAGLE directory: EAGLE-3 with further plain layers and ``mask_hidden``."""
    tensors, config = speculators("peagle", mask_token_id=5, architectures=["PEagleSpeculator"])
    tensors["mask_hidden"] = random(1, 1, 3 * H)
    for index in range(1, layers):
        tensors |= llama_layer(f"layers.{index}.", H)
        tensors[f"layers.{index}.input_layernorm.weight"] = random(H)
    config["transformer_layer_config"]["num_hidden_layers"] = layers
    return tensors, config


def mtp() -> tuple[Tensors, Config]:
    """An mtp directory; the nested configuration is the target's own, all its layers counted."""
    prefix = "mtp_layers.0."
    tensors = {
        f"{prefix}token_layernorm.weight": random(H, seed=16),
        f"{prefix}hidden_layernorm.weight": random(H, seed=17),
        f"{prefix}input_proj.weight": random(H, 2 * H, seed=18),
        f"{prefix}input_layernorm.weight": random(H, seed=19),
        **llama_layer(prefix, H),
        f"{prefix}final_layernorm.weight": random(H, seed=20),
    }
    _, config = speculators("mtp", num_nextn_predict_layers=1, architectures=["MTPDraftModel"])
    kept = ("architectures", "speculators_model_type", "speculators_version", "speculators_config", "torch_dtype")
    layer = {**LLAMA, "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    return tensors, {
        **{key: config[key] for key in kept},
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer,
    }


def eagle(bias: bool = True) -> tuple[Tensors, Config]:
    """EAGLE-1/2 (``yuhuili/EAGLE-*``), with the copy of the target's embedding that is usually there."""
    tensors = {
        "embed_tokens.weight": random(V, H, seed=1),
        "fc.weight": random(H, 2 * H, seed=21),
        **({"fc.bias": random(H, seed=22)} if bias else {}),
        **llama_layer("layers.0.", H),
    }
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": bias, "use_cache": True}
    return tensors, config


def medusa(heads: int = 3, blocks: int = 1, own: bool = True) -> tuple[Tensors, Config]:
    """``medusa_lm_head.pt`` of either generation; the published configurations' wrong head count."""
    tensors: Tensors = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = random(H, H, seed=30 + 10 * head + block)
            tensors[f"{head}.{block}.linear.bias"] = random(H, seed=31 + 10 * head + block)
        if own:
            tensors[f"{head}.{blocks}.weight"] = random(V, H, seed=32 + 10 * head)
    return tensors, {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "tiny"}


def vllm_medusa(heads: int = 3, blocks: int = 2, reduced: bool = True) -> tuple[Tensors, Config]:
    """vLLM's layout with own output matrices; ``token_map`` in no particular order."""
    order = torch.randperm(VD, generator=torch.Generator().manual_seed(3))
    draft = VD if reduced else V
    tensors: Tensors = {"token_map": DRAFT_IDS[order]} if reduced else {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"blocks.{head}.layers.{block}.weight"] = random(H, H, seed=50 + 10 * head + block)
            tensors[f"blocks.{head}.layers.{block}.bias"] = random(H, seed=51 + 10 * head + block)
        tensors[f"lm_heads.{head}.weight"] = random(draft, H, seed=52 + 10 * head)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": blocks,
        "medusa_fc_bias": True,
        **({"truncated_vocab_size": VD} if reduced else {}),
    }
    return tensors, config


def hydra(heads: int = 3, blocks: int = 2) -> tuple[Tensors, Config]:
    """``hydra_lm_head.pt`` of grounded mlp heads, output matrices with biases."""
    tensors: Tensors = {}
    for head in range(heads):
        stem = f"hydra_mlp.{head}"
        for part in ("linear", "res_connection"):
            tensors[f"{stem}.0.{part}.weight"] = random(H, (head + 2) * H, seed=70 + len(part))
            tensors[f"{stem}.0.{part}.bias"] = random(H, seed=71 + len(part))
        for block in range(1, blocks):
            tensors[f"{stem}.{block}.linear.weight"] = random(H, H, seed=72 + head)
            tensors[f"{stem}.{block}.linear.bias"] = random(H, seed=73 + head)
        tensors[f"hydra_lm_head.{head}.weight"] = random(V, H, seed=74 + head)
        tensors[f"hydra_lm_head.{head}.bias"] = random(V, seed=75 + head)
    config = {
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "tiny",
    }
    return tensors, config


def write(folder: Path, tensors: Mapping[str, Tensor], config: Config | None, name: str = "model.safetensors") -> Path:
    """Store a head; a ``.pt`` or ``.bin`` name makes a pickle."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    else:
        torch.save(dict(tensors), folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
