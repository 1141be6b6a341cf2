"""llama.cpp's tensor names <-> transformers' names, and the row order of rotary heads in Llama files.

llama.cpp's converter stores q and k rows of the ``llama`` architecture in interleaved rotary order (pairs 2i, 2i + 1);
transformers keeps pairs i and i + head_dim / 2. All other architectures keep transformers' order.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

INTERLEAVED_ARCHITECTURES = ("llama",)

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
_GEMMA_BLOCK_BACK = {theirs: ours for ours, theirs in _GEMMA_BLOCK.items()}
_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HF_BLOCK = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")


def to_transformers(name: str, architecture: str) -> str | None:
    """transformers' name of a GGUF tensor; ``None`` for one that the architecture does not have."""
    block = _GEMMA_BLOCK if architecture.startswith("gemma") else _BLOCK
    return _translate(name, _GGUF_BLOCK, block, _TOP, "model.layers")


def to_gguf(name: str, architecture: str) -> str | None:
    """GGUF name of a transformers tensor; ``None`` for one that the architecture does not have."""
    block = _GEMMA_BLOCK_BACK if architecture.startswith("gemma") else _BLOCK_BACK
    return _translate(name, _HF_BLOCK, block, _TOP_BACK, "blk")


def _translate(
    name: str, pattern: re.Pattern[str], block: dict[str, str], top: dict[str, str], layers: str
) -> str | None:
    match = pattern.fullmatch(name)
    if match is None:
        stem, _, ending = name.rpartition(".")
        return f"{top[stem]}.{ending}" if stem in top and ending == "weight" else None
    layer, stem, ending = match.groups()
    return f"{layers}.{layer}.{block[stem]}.{ending}" if stem in block else None


def half_split_rows(rows: int, head_dim: int) -> Tensor:
    """Indices [rows]: ``stored[half_split_rows(...)]`` turns interleaved rows into transformers' order."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)
