"""Model metadata -> ``DecoderConfig``: from a transformers ``config.json`` here, from a GGUF in ``gguf_config.py``.

Defaults of absent fields are those of transformers' configuration classes (old ``rope_scaling`` and the
``rope_parameters`` of transformers 5 alike). Knows nothing of weight files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import ModelFileError
from outrider.models.architectures import (
    ROPE_SCALINGS,
    SUPPORTED,
    Fields,
    check_config,
    count_experts,
    is_recurrent,
    refuse,
    refuse_feature,
)
from outrider.models.config import DecoderConfig, RopeConfig
from outrider.models.gguf_config import config_from_gguf

__all__ = ["config_from_gguf", "config_from_hf"]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What transformers assumes for fields that a ``config.json`` omits; ``None`` means that it must not.

    Gemma-3's published files rely on these: they omit even the number of heads and the vocabulary's size.
    """

    max_positions: int
    num_heads: int | None = None
    vocab_size: int | None = None
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / heads
    sliding_window: int | None = None
    window_pattern: int = 0  # every n-th layer is full attention; 0: no pattern
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    attention_cap: float | None = None
    final_cap: float | None = None


_DEFAULTS = {
    "llama": _Defaults(2048, bos_id=1, eos_id=2),
    "mistral": _Defaults(4096 * 32, num_kv_heads=8, sliding_window=4096, bos_id=1, eos_id=2),
    "qwen2": _Defaults(32768, num_kv_heads=32, sliding_window=4096),
    "qwen3": _Defaults(32768, num_kv_heads=32, head_dim=128, sliding_window=4096),
    "gemma2": _Defaults(8192, 8, 256000, 4, 256, 4096, 2, 10000.0, True, 2, 1, 50.0, 30.0),
    "gemma3": _Defaults(131072, 8, 262208, 4, 256, 4096, 6, 1000000.0, True, 2, 1),
}


def config_from_hf(config: dict[str, object], source: str = "config.json") -> DecoderConfig:
    """Read a transformers configuration dictionary.

    Args:
        config: the parsed ``config.json``; Gemma-3's multimodal one is read through its ``text_config``.
        source: file to name in messages.

    Raises:
        UnsupportedModelError: an architecture or feature that our decoder does not run.
        ModelFileError: a field is missing, of the wrong type, or contradicts another.
    """
    model_type = Fields(config, source).text("model_type")
    values: Mapping[str, object] = config
    if model_type == "gemma3":
        outer: dict[str, object] = {
            k: config[k] for k in ("eos_token_id", "bos_token_id", "tie_word_embeddings") if k in config
        }
        values = {**outer, **Fields(config, source).mapping("text_config")}
    family = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    layer_types = values.get("layer_types")
    kinds = layer_types if isinstance(layer_types, list) else []
    experts = count_experts(values)
    if family not in SUPPORTED or experts or is_recurrent(family, kinds):
        refuse(model_type, kinds, experts)
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        refuse_feature(f"layers of type '{unknown[0]}'")
    _refuse_features(values, family)
    return check_config(_build(family, Fields(values, source)), source)


def _refuse_features(values: Mapping[str, object], family: str) -> None:
    if values.get("quantization_config"):
        refuse_feature("weights quantised for transformers ('quantization_config')")
    if values.get("use_bidirectional_attention"):
        refuse_feature("bidirectional attention")
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        refuse_feature("partial rotary embedding ('partial_rotary_factor')")
    default = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    activation = values.get("hidden_activation" if family.startswith("gemma") else "hidden_act") or default
    if str(activation) not in _ACTIVATIONS:
        refuse_feature(f"hidden_act {activation!r} (it knows silu and gelu_pytorch_tanh)")


def _build(family: str, fields: Fields) -> DecoderConfig:
    defaults = _DEFAULTS[family]
    is_gemma = family.startswith("gemma")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", defaults.num_heads)
    if heads < 1:
        raise ModelFileError(f"{fields.source}: 'num_attention_heads' is {heads}; the file is damaged")
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden // heads)
    kv_heads = _nullable(fields, "num_key_value_heads", defaults.num_kv_heads)
    attention_bias = fields.flag("attention_bias", False) if family not in ("qwen2", "mistral") else False
    query_scalar = fields.number("query_pre_attn_scalar", 256.0) if is_gemma else float(head_dim)
    act = fields.text("hidden_activation", "gelu_pytorch_tanh") if is_gemma else fields.text("hidden_act", "silu")
    full, sliding = _ropes(family, fields, defaults)
    attention_cap = _soft_cap(fields, "attn_logit_softcapping", defaults.attention_cap) if is_gemma else None
    final_cap = _soft_cap(fields, "final_logit_softcapping", defaults.final_cap) if is_gemma else None
    return DecoderConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        context_length=fields.integer("max_position_embeddings", defaults.max_positions),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_full=full,
        rope_sliding=sliding,
        windows=_windows(family, fields, defaults),
        qk_scale=1.0 / math.sqrt(query_scalar) if query_scalar > 0 else math.nan,
        tie_embeddings=fields.flag("tie_word_embeddings", defaults.tie_embeddings),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family == "llama" else False,
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=is_gemma,
        norm_offset=1.0 if is_gemma else 0.0,
        embedding_scale=math.sqrt(hidden) if is_gemma and hidden > 0 else 1.0,
        activation=_ACTIVATIONS[act],
        attention_soft_cap=attention_cap,
        final_soft_cap=final_cap,
        bos_id=_nullable(fields, "bos_token_id", defaults.bos_id),
        eos_ids=_eos_ids(fields, defaults),
    )


def _nullable(fields: Fields, key: str, default: int | None) -> int | None:
    """An integer whose explicit null means null, and whose absence means ``default``."""
    return fields.optional_integer(key) if key in fields.values else default


def _soft_cap(fields: Fields, key: str, default: float | None) -> float | None:
    return fields.optional_number(key) if key in fields.values else default


def _eos_ids(fields: Fields, defaults: _Defaults) -> tuple[int, ...]:
    if "eos_token_id" in fields.values or defaults.eos_id is None:
        return fields.integers("eos_token_id")
    return (defaults.eos_id,)


def _windows(family: str, fields: Fields, defaults: _Defaults) -> tuple[int | None, ...]:
    """Window of every layer. Explicit ``layer_types`` win, except for mistral, where transformers ignores them too."""
    layers = max(0, min(fields.integer("num_hidden_layers"), 1 << 16))  # check_config refuses absurd counts later
    window = _nullable(fields, "sliding_window", defaults.sliding_window)
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        return (window,) * layers
    if family.startswith("qwen") and not fields.flag("use_sliding_window", False):
        window = None
    listed = fields.values.get("layer_types")
    if isinstance(listed, list):
        is_sliding = [kind == "sliding_attention" for kind in listed]
    elif family.startswith("qwen"):
        first = fields.integer("max_window_layers", 28)
        is_sliding = [window is not None and layer >= first for layer in range(layers)]
    else:
        pattern = fields.integer("sliding_window_pattern", defaults.window_pattern) if family == "gemma3" else 2
        is_sliding = [pattern > 0 and bool((layer + 1) % pattern) for layer in range(layers)]
    if any(is_sliding) and window is None:
        raise ModelFileError(f"{fields.source}: sliding layers without a 'sliding_window'; the file is damaged")
    return tuple(window if sliding else None for sliding in is_sliding)


def _ropes(family: str, fields: Fields, defaults: _Defaults) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embedding of full and of sliding layers: one for all families but gemma3."""
    parameters = dict(fields.mapping("rope_parameters"))
    scaling = dict(fields.mapping("rope_scaling"))
    theta = fields.number("rope_theta", defaults.rope_theta)
    if family != "gemma3":
        full = Fields({**parameters, **scaling}, fields.source)
        if "full_attention" in full.values:
            full = Fields(full.mapping("full_attention"), fields.source)
        rope = _rope(full, theta, fields, defaults)
        return rope, rope
    is_flat = "full_attention" not in parameters and "sliding_attention" not in parameters
    nested = Fields({"full_attention": parameters} if is_flat else parameters, fields.source)
    full = Fields({**nested.mapping("full_attention"), **scaling}, fields.source)
    sliding = Fields(nested.mapping("sliding_attention"), fields.source)
    local = fields.number("rope_local_base_freq", 10000.0)
    return _rope(full, theta, fields, defaults), _rope(sliding, local, fields, defaults)


def _rope(rope: Fields, theta: float, fields: Fields, defaults: _Defaults) -> RopeConfig:
    """One rotary embedding from its dictionary; ``theta`` is the base when the dictionary names none."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_SCALINGS:
        refuse_feature(f"rope scaling '{kind}' (it knows {', '.join(ROPE_SCALINGS)})")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        refuse_feature("partial rotary embedding ('partial_rotary_factor')")
    base = rope.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(base)
    scaling = {k: v for k, v in rope.values.items() if k not in ("type", "rope_theta", "partial_rotary_factor")}
    scaling["rope_type"] = kind
    scaling["factor"] = rope.number("factor")
    if kind in ("llama3", "yarn"):
        positions = fields.integer("max_position_embeddings", defaults.max_positions)
        scaling.setdefault("original_max_position_embeddings", positions)
    return RopeConfig(base, scaling)
