"""GGUF metadata -> ``DecoderConfig``, following llama.cpp's keys and the defaults that it builds in.

Differences from ``config.json``: Gemma's norms are stored with their +1 already added, tied embeddings and biases show
only by which tensors exist, and Llama-3's rotary scaling is a tensor of factors. Does not read files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from outrider.errors import ModelFileError
from outrider.models.architectures import Fields, check_config, refuse, refuse_feature
from outrider.models.config import DecoderConfig, RopeConfig

ROPE_FACTORS = "rope_freqs.weight"
"""GGUF name of Llama-3's frequency divisors, float32 [head_dim / 2]."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LOCAL_THETA = 10000.0  # Gemma-3's sliding layers; older files do not say it
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # the one size whose query scale is not 1 / sqrt(head_dim)


def config_from_gguf(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    rope_factors: Sequence[float] | None = None,
    source: str = "GGUF metadata",
) -> DecoderConfig:
    """Read a GGUF's key/value section.

    Args:
        metadata: keys as in the file (``llama.block_count``), values as Python objects.
        tensor_names: the file's own tensor names (``blk.0.attn_q.bias``).
        rope_factors: values of the tensor ``rope_freqs.weight``, needed when the file has it.
        source: file to name in messages.

    Raises:
        UnsupportedModelError: an architecture or feature that our decoder does not run.
        ModelFileError: a key is missing, of the wrong type, or contradicts another.
    """
    architecture = Fields(metadata, source).text("general.architecture")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(values, source)
    experts = fields.integer("expert_count", 0)
    if architecture not in _ARCHITECTURES or experts:
        refuse(architecture, experts=experts)
    tokens = Fields(metadata, source)
    sizes = _Sizes(fields)
    is_gemma = architecture.startswith("gemma")
    full, sliding = _ropes(architecture, fields, sizes, tensor_names, rope_factors)
    config = DecoderConfig(
        family=architecture,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.single("feed_forward_length"),
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.single("attention.head_count_kv", sizes.heads),
        head_dim=sizes.head_dim,
        vocab_size=_vocab_size(fields, tokens),
        context_length=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_full=full,
        rope_sliding=sliding,
        windows=_windows(architecture, fields, sizes.layers),
        qk_scale=_qk_scale(architecture, fields, sizes),
        tie_embeddings="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=is_gemma,
        embedding_scale=math.sqrt(sizes.hidden) if is_gemma else 1.0,
        activation="gelu_tanh" if is_gemma else "silu",
        attention_soft_cap=fields.number("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
        final_soft_cap=_final_cap(architecture, fields),
        bos_id=tokens.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(tokens),
    )
    return check_config(config, source)


class _Sizes:
    """Sizes that several fields derive from."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.layers = fields.integer("block_count")
        self.hidden = self.single("embedding_length")
        self.heads = self.single("attention.head_count")
        if self.hidden < 1 or self.heads < 1:
            raise ModelFileError(f"{fields.source}: {self.hidden} wide with {self.heads} heads; the file is damaged")
        self.head_dim = fields.integer("attention.key_length", self.hidden // self.heads)
        if fields.integer("attention.value_length", self.head_dim) != self.head_dim:
            refuse_feature("values of another size than keys")
        if fields.integer("rope.dimension_count", self.head_dim) != self.head_dim:
            refuse_feature("partial rotary embedding ('rope.dimension_count')")

    def single(self, key: str, default: int | None = None) -> int:
        """An integer, or a list with the same one for every layer."""
        value = self.fields.values.get(key)
        if not isinstance(value, list) or not value:
            return self.fields.integer(key, default)
        if any(item != value[0] for item in value):
            refuse_feature(f"layers of different sizes ('{key}')")
        return Fields({key: value[0]}, self.fields.source).integer(key)


def _vocab_size(fields: Fields, tokens: Fields) -> int:
    listed = tokens.values.get("tokenizer.ggml.tokens")
    return fields.integer("vocab_size", len(listed) if isinstance(listed, list) else None)


def _qk_scale(architecture: str, fields: Fields, sizes: _Sizes) -> float:
    default = 1.0 / math.sqrt(max(1, sizes.head_dim))
    if _LAYERS_OF_27B.get(architecture) == sizes.layers:
        default = 1.0 / math.sqrt(sizes.hidden / sizes.heads)
    return fields.number("attention.scale", default)


def _final_cap(architecture: str, fields: Fields) -> float | None:
    if architecture == "gemma2":
        return fields.number("final_logit_softcapping", 30.0)
    return fields.optional_number("final_logit_softcapping") if architecture == "gemma3" else None


def _eos_ids(tokens: Fields) -> tuple[int, ...]:
    """End of sequence, of turn and of message: llama.cpp stops at each."""
    ids = [tokens.optional_integer(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _windows(architecture: str, fields: Fields, layers: int) -> tuple[int | None, ...]:
    layers = max(0, min(layers, 1 << 16))  # check_config refuses absurd counts later
    window = fields.integer("attention.sliding_window", 4096 if architecture == "gemma2" else 0) or None
    listed = fields.values.get("attention.sliding_window_pattern")
    if isinstance(listed, list):
        return tuple(window if is_sliding else None for is_sliding in listed)
    if architecture in ("gemma2", "gemma3"):
        pattern = fields.integer("attention.sliding_window_pattern", 2 if architecture == "gemma2" else 6)
        return tuple(window if pattern > 0 and (layer + 1) % pattern else None for layer in range(layers))
    return (window,) * layers


def _ropes(
    architecture: str,
    fields: Fields,
    sizes: _Sizes,
    tensor_names: Collection[str],
    rope_factors: Sequence[float] | None,
) -> tuple[RopeConfig, RopeConfig]:
    theta = fields.number("rope.freq_base", 10000.0)
    scaling = _scaling(fields)
    if ROPE_FACTORS in tensor_names:
        if scaling or rope_factors is None or len(rope_factors) != sizes.head_dim // 2:
            raise ModelFileError(
                f"{fields.source}: '{ROPE_FACTORS}' must hold {sizes.head_dim // 2} frequency factors, and no other "
                "rope scaling may be set; the file is damaged"
            )
        if not all(math.isfinite(factor) and factor > 0 for factor in rope_factors):
            raise ModelFileError(f"{fields.source}: '{ROPE_FACTORS}' holds a factor that is not positive")
        scaling = {"rope_type": "llama3_factors", "factors": list(rope_factors)}
    full = RopeConfig(theta, scaling)
    if architecture != "gemma3":
        return full, full
    return full, RopeConfig(fields.number("rope.freq_base_swa", _LOCAL_THETA))


def _scaling(fields: Fields) -> dict[str, object]:
    linear = fields.number("rope.scale_linear", 1.0)  # the key of old files
    kind = fields.text("rope.scaling.type", "linear" if linear != 1.0 else "none")
    if kind == "none":
        return {}
    factor = fields.number("rope.scaling.factor", linear)
    if factor <= 0:
        raise ModelFileError(f"{fields.source}: rope scaling factor {factor} must be positive; the file is damaged")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    if kind != "yarn":
        refuse_feature(f"rope scaling '{kind}' (it knows none, linear, yarn and Llama-3's factors)")
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    scaling: dict[str, object] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := fields.optional_number(f"rope.scaling.{key}")) is not None:
            scaling[name] = value
    if (attention := fields.optional_number("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return scaling
