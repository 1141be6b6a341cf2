"""Model metadata -> DecoderConfig, compared with transformers' own reading; junk is always a deliberate error."""

from __future__ import annotations

import json
import math

import pytest
from tiny_checkpoints import LLAMA
from transformers import AutoConfig

from outrider.errors import ModelFileError, OutriderError, UnsupportedModelError
from outrider.models.architectures import is_recurrent
from outrider.models.config import RopeConfig
from outrider.models.family import config_from_gguf, config_from_hf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_attention_heads": 32,
    "vocab_size": 48,
}
CASES: list[tuple[str, dict[str, object]]] = [
    ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 16, "head_dim": 32}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3, "rope_theta": 1e6}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 3}),
    ("qwen3", {"attention_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("gemma2", {"query_pre_attn_scalar": 64}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3}),
    ("gemma3_text", {"rope_local_base_freq": 5000.0, "rope_theta": 2e6, "final_logit_softcapping": 20.0}),
]


@pytest.mark.parametrize(("model_type", "fields"), CASES)
@pytest.mark.parametrize("style", ["as published", "as transformers 5 saves it"])
def test_same_reading_as_transformers(model_type: str, fields: dict[str, object], style: str) -> None:
    raw = {"model_type": model_type, "num_hidden_layers": 8, **SHAPE, **fields}
    theirs = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    ours = config_from_hf(raw if style == "as published" else theirs.to_dict())
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_id, ours.eos_ids) == (
        theirs.bos_token_id,
        () if theirs.eos_token_id is None else (theirs.eos_token_id,),
    )
    assert ours.windows == _their_windows(theirs, model_type)
    scalar = getattr(theirs, "query_pre_attn_scalar", ours.head_dim)
    assert ours.qk_scale == pytest.approx(scalar**-0.5)
    assert ours.final_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.qkv_bias == (model_type == "qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.output_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    parameters = theirs.rope_parameters
    nested = (
        parameters
        if "full_attention" in parameters
        else dict.fromkeys(("full_attention", "sliding_attention"), parameters)
    )
    _same_rope(ours.rope_full, nested["full_attention"])
    _same_rope(ours.rope_sliding, nested["sliding_attention"])


def _their_windows(theirs: object, model_type: str) -> tuple[int | None, ...]:
    if model_type == "llama":
        return (None,) * 8
    window = theirs.sliding_window  # type: ignore[attr-defined]
    if model_type == "mistral":
        return (window,) * 8
    kinds = theirs.layer_types  # type: ignore[attr-defined]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _same_rope(ours: RopeConfig, theirs: dict[str, object]) -> None:
    assert ours.theta == theirs["rope_theta"]
    if theirs["rope_type"] == "default":
        assert ours.scaling == {}
        return
    assert ours.scaling == {k: v for k, v in theirs.items() if k not in ("rope_theta", "type")}


def test_gemma_constants() -> None:
    config = config_from_hf({"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32, **SHAPE})
    assert config.norm_offset == 1.0
    assert config.post_norms
    assert config.qk_norm
    assert config.activation == "gelu_tanh"
    assert config.embedding_scale == math.sqrt(256)
    assert config.windows == (4096,) * 5 + (None, 4096)
    assert (config.rope_full.theta, config.rope_sliding.theta) == (1e6, 1e4)


def test_published_multimodal_gemma3_omits_what_transformers_knows() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = config_from_hf({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.eos_ids == (1, 106)
    assert config.tie_embeddings


def test_explicit_layer_types_win() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = config_from_hf(
        LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "layer_types": kinds}
    )
    assert config.windows == (9, None)
    with pytest.raises(ModelFileError, match="1 layer types for 2 layers"):
        config_from_hf(LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "llama, mistral, qwen2.*--fallback"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts.*--fallback"),
        ({"num_experts": 4}, "mixture of experts"),
        ({"model_type": "mamba2"}, "cannot be rolled back"),
        ({"model_type": "qwen3_next", "num_experts": 512}, "cannot be rolled back"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]}, "cannot be rolled back"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(LLAMA | change)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_junk_in_any_field_is_a_deliberate_error(model_type: str) -> None:
    extra = (
        "head_dim",
        "sliding_window",
        "layer_types",
        "rope_scaling",
        "rope_parameters",
        "eos_token_id",
        "hidden_act",
    )
    more = ("hidden_activation", "query_pre_attn_scalar", "use_sliding_window", "max_window_layers", "attention_bias")
    junk: list[object] = [
        None,
        0,
        -1,
        10**30,
        1.5,
        math.nan,
        math.inf,
        "x",
        [],
        [[]],
        {},
        {"rope_type": []},
        {"full_attention": 3},
        True,
    ]
    messages: list[str] = []
    for key in (*LLAMA, *extra, *more, "text_config", "num_experts", "final_logit_softcapping"):
        for value in junk:
            try:
                config_from_hf(LLAMA | {"model_type": model_type, key: value})
            except OutriderError as error:
                messages.append(str(error))
    assert len(messages) > 80
    assert not [message for message in messages if "\n" in message]


def _metadata(architecture: str, fields: dict[str, object]) -> dict[str, object]:
    base: dict[str, object] = {
        "block_count": 7,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 48,
    }
    tokens = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 2}
    return {
        "general.architecture": architecture,
        **tokens,
        **{f"{architecture}.{k}": v for k, v in {**base, **fields}.items()},
    }


def test_gguf_defaults() -> None:
    config = config_from_gguf(_metadata("llama", {}), ["output.weight"])
    assert (config.head_dim, config.eos_ids, config.bos_id, config.tie_embeddings) == (16, (1, 5), 2, False)
    assert config.windows == (None,) * 7
    assert config.qk_scale == 0.25
    assert config.rope_full == RopeConfig(10000.0)


def test_gguf_gemma() -> None:
    gemma3 = config_from_gguf(
        _metadata(
            "gemma3",
            {
                "attention.sliding_window": 8,
                "rope.freq_base": 1e6,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
        ),
        [],
    )
    assert gemma3.windows == (8,) * 5 + (None, 8)
    assert gemma3.rope_full == RopeConfig(1e6, {"rope_type": "linear", "factor": 8.0})
    assert gemma3.rope_sliding == RopeConfig(10000.0)
    assert gemma3.norm_offset == 0.0
    assert gemma3.embedding_scale == 8.0
    assert gemma3.final_soft_cap is None
    patterned = config_from_gguf(
        _metadata("gemma3", {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True] + [False] * 6}),
        [],
    )
    assert patterned.windows == (8,) + (None,) * 6
    gemma2 = config_from_gguf(_metadata("gemma2", {}), [])
    assert gemma2.windows == (4096, None, 4096, None, 4096, None, 4096)
    assert (gemma2.attention_soft_cap, gemma2.final_soft_cap) == (50.0, 30.0)
    large = config_from_gguf(
        _metadata("gemma2", {"block_count": 46, "attention.key_length": 32, "attention.value_length": 32}), []
    )
    assert large.qk_scale == pytest.approx((64 / 4) ** -0.5)


def test_gguf_yarn() -> None:
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    scaling = config_from_gguf(_metadata("qwen2", fields), []).rope_full.scaling
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("mamba", {}, "cannot be rolled back"),
        ("granitehybrid", {}, "cannot be rolled back"),
        ("phi3", {}, "llama, mistral, qwen2.*--fallback"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "longrope"),
        ("qwen2", {"rope.dimension_count": 8}, "partial rotary"),
        ("llama", {"attention.head_count": [4, 2]}, "different sizes"),
    ],
)
def test_gguf_refusals(architecture: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_gguf(_metadata(architecture, fields), [])


def test_gguf_complaints_name_the_key() -> None:
    for key, value, message in [
        ("block_count", None, "lacks 'block_count'"),
        ("block_count", 1 << 40, "num_layers is"),
        ("attention.head_count_kv", 3, "share"),
        ("context_length", "long", "'context_length' must be an integer"),
        ("attention.layer_norm_rms_epsilon", 0.0, "norm_eps"),
        ("rope.freq_base", math.nan, "finite"),
    ]:
        with pytest.raises(ModelFileError, match=message):
            config_from_gguf(_metadata("llama", {key: value}), [])
    with pytest.raises(ModelFileError, match="frequency factors"):
        config_from_gguf(_metadata("llama", {}), ["rope_freqs.weight"])


def test_recurrent_names() -> None:
    assert is_recurrent("RWKV7")
    assert is_recurrent("llama", ["mamba2"])
    assert not is_recurrent("llama", ["full_attention"])
    assert not is_recurrent("qwen3")
