"""What a model is, as a short key: results tuned for a model are stored under it.

The key covers the decoder's sizes and all its norm weights, rounded to bfloat16. Norms are stored unquantised in every
format, so a quantised file and its original share the key, while a model trained further does not (one whose norms
were frozen does: nothing that is stored under a key may decide more than speed).
"""

from __future__ import annotations

import hashlib

import torch

from outrider.models.base import LanguageModel
from outrider.models.decoder import Decoder

_DIGITS = 24


def fingerprint(model: LanguageModel) -> str | None:
    """24 hexadecimal digits, or ``None`` for a model that has no weights of ours to tell it by (toy, fallback)."""
    if not isinstance(model, Decoder):
        return None
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads)
    digest = hashlib.sha256(repr((config.family, *sizes, config.head_dim, config.vocab_size)).encode())
    norms = [norm for block in model.blocks for norm in (block.input_norm, block.mlp_norm)]
    for norm in (*norms, model.final_norm):
        digest.update(norm.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()[:_DIGITS]
