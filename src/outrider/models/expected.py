"""The tensors that a decoder of a given configuration needs, and the check of a file against them.

Names and shapes are those of transformers' ``*ForCausalLM`` state dicts. Does not read files.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.errors import ModelFileError
from outrider.models.config import DecoderConfig


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that ``models/decoder.py`` reads, by transformers name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    block = _block_shapes(config)
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in block.items()})
    return shapes


def _block_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.post_norms else []
    shapes.update({f"{name}.weight": (hidden,) for name in norms})
    if config.qk_norm:
        shapes.update({f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")})
    return shapes


def check_shapes(config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compare what a file holds with what its configuration needs; tensors beyond those are not looked at.

    Raises:
        ModelFileError: naming the first tensor that is missing or has another shape.
    """
    for name, wanted in expected_shapes(config).items():
        found = shapes.get(name)
        if found is None:
            raise ModelFileError(f"{source} has no tensor '{name}'; the model is incomplete, download it again")
        if found != wanted:
            raise ModelFileError(
                f"{source}: tensor '{name}' is {list(found)}, but the model's configuration needs {list(wanted)}; "
                "the configuration and the weights do not belong together, or the file is damaged"
            )
