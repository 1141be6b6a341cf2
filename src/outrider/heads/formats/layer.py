"""A head's transformer layer in other projects' terms: sizes from tensors and a Llama configuration, and back."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.errors import ModelFileError
from outrider.heads.config import AttentionConfig
from outrider.heads.formats.base import TargetFacts, need_target
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal
from outrider.models.architectures import Fields
from outrider.models.config import RopeConfig
from outrider.models.rope import rope_frequencies

LAYER_FIELDS = frozenset(
    {
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "vocab_size",
    }
)
"""Fields of a Llama configuration that ``read_layer`` reads or compares."""

_DEFAULT_EPS, _DEFAULT_THETA, _DEFAULT_CONTEXT = 1e-6, 10000.0, 2048  # transformers' LlamaConfig


def read_layer(raw: RawHead, config: Mapping[str, object], prefix: str) -> dict[str, object]:
    """Fields of ``AttentionConfig``, and ``hidden_size``, of the layer whose tensors start with ``prefix``.

    Args:
        config: a Llama configuration.

    Raises:
        ModelFileError: absent head count, or sizes that differ from the tensors'.
        UnsupportedModelError: a rotary scaling that is not implemented.
    """
    where = str(raw.path)
    fields = Fields(config, where)
    if config.get("num_attention_heads") is None:
        raise ModelFileError(f"{where} has no config.json with 'num_attention_heads'; the tensors cannot tell it")
    hidden, queries = _matrix(raw, f"{prefix}self_attn.o_proj.weight")
    keys, _ = _matrix(raw, f"{prefix}self_attn.k_proj.weight")
    wide, _ = _matrix(raw, f"{prefix}mlp.gate_proj.weight")
    heads = fields.integer("num_attention_heads")
    if heads < 1 or queries % heads or keys % (queries // heads):
        raise ModelFileError(
            f"{where}: {queries} query and {keys} key rows are no {heads} heads; num_attention_heads does not fit"
        )
    head_dim = queries // heads
    found = {"hidden_size": hidden, "intermediate_size": wide, "head_dim": head_dim}
    for key, value in {**found, "num_key_value_heads": keys // head_dim}.items():
        check_equal(config, key, value, where)
    theta, scaling = _rope(fields)
    context = fields.integer("max_position_embeddings", _DEFAULT_CONTEXT)
    rope_frequencies(RopeConfig(theta, scaling), head_dim, context)
    return {
        **found,
        "num_heads": heads,
        "num_kv_heads": keys // head_dim,
        "norm_eps": fields.number("rms_norm_eps", _DEFAULT_EPS),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "context_length": context,
    }


def read_vocabulary(config: Mapping[str, object], raw: RawHead, target: TargetFacts | None) -> int:
    """The target's vocabulary size: of the embedding in the file, else of the configuration, else of the target."""
    where = str(raw.path)
    embedded = raw.shape("embed_tokens.weight")[0] if "embed_tokens.weight" in raw.names else None
    stated = Fields(config, where).optional_integer("vocab_size")
    if embedded is not None:
        check_equal(config, "vocab_size", embedded, where)
        return embedded
    return stated if stated is not None else need_target(target, f"{where} does not say its vocabulary").vocab_size


def llama_config(config: AttentionConfig, target: TargetFacts | None) -> dict[str, object]:
    """A Llama configuration of one layer; positions are raised to the target's."""
    context = max(config.context_length, 0 if target is None else target.context_length)
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) or None,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _matrix(raw: RawHead, name: str) -> tuple[int, int]:
    shape = raw.shape(name)
    if len(shape) != 2:
        raise ModelFileError(f"{raw.path}: tensor '{name}' has shape {list(shape)}, it must be a matrix")
    return shape[0], shape[1]


def _rope(fields: Fields) -> tuple[float, dict[str, object]]:
    """Base and scaling, from the old fields or transformers 5's ``rope_parameters``."""
    parameters = dict(fields.mapping("rope_parameters"))
    scaling = dict(fields.mapping("rope_scaling"))
    theta = Fields(parameters, fields.source).number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    scaling = scaling or {key: value for key, value in parameters.items() if key != "rope_theta"}
    scaling.pop("rope_theta", None)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return theta, {} if kind == "default" else scaling
