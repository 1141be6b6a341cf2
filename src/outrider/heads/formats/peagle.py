"""P-EAGLE heads of the speculators project: checked completely, though no network here computes them.

An EAGLE-3 head with several layers that guesses all depths in one pass (speculators' ``peagle``): the first layer reads
token and state, the later ones are plain; ``mask_hidden`` stands in for the states that are not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.errors import ModelFileError
from outrider.heads.file import check_tensors
from outrider.heads.formats.layer import read_layer
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal, check_names, load_floats, read_map
from outrider.models.architectures import Fields

_MAPS = ("d2t", "t2d")


def check_peagle(
    raw: RawHead,
    layer_config: Mapping[str, object],
    flags: Mapping[str, bool],
    features: int,
    layers: object,
    vocabulary: int,
) -> None:
    """Check names, shapes, numbers and maps of a P-EAGLE head.

    Args:
        features: target hidden states that it reads.
        layers: ``num_hidden_layers`` as configured.

    Raises:
        ModelFileError: the files are not a complete and consistent head.
    """
    where = str(raw.path)
    sizes = {key: value for key, value in read_layer(raw, layer_config, "layers.0.").items() if isinstance(value, int)}
    draft = raw.shape("lm_head.weight")[0]
    check_equal(raw.config, "draft_vocab_size", draft, where)
    mask = Fields(raw.config, where).integer("mask_token_id")
    if not 0 <= mask < vocabulary:
        raise ModelFileError(f"{where}: mask_token_id {mask} is no token of the target's {vocabulary}")
    found = 1 + max(int(name.split(".")[1]) for name in raw.names if name.startswith("layers."))
    if layers is not None and layers != found:
        raise ModelFileError(f"{where}: the configuration says num_hidden_layers = {layers}, the tensors say {found}")
    expected = _shapes(sizes, flags, features, found, draft)
    if "embed_tokens.weight" in raw.names:
        expected["embed_tokens.weight"] = (vocabulary, sizes["hidden_size"])
    tensors = load_floats(raw, {name: name for name in expected})
    check_names(raw, [*expected, *_MAPS])
    check_tensors(tensors, expected, where)
    read_map(raw, draft, vocabulary)


def _shapes(
    sizes: Mapping[str, int], flags: Mapping[str, bool], features: int, layers: int, draft: int
) -> dict[str, tuple[int, ...]]:
    hidden = sizes["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features * hidden),
        "mask_hidden": (1, 1, features * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
    }
    if flags["norm_before_fc"]:
        shapes["input_norm.weight"] = (features * hidden,)
    if flags["fc_norm"]:
        shapes.update({f"fc_norm.{index}.weight": (hidden,) for index in range(features)})
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    for index in range(layers):
        inputs = 2 * hidden if index == 0 else hidden
        shapes.update({f"layers.{index}.{name}": shape for name, shape in _layer_shapes(sizes, inputs).items()})
    return shapes


def _layer_shapes(sizes: Mapping[str, int], inputs: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = sizes["num_heads"] * sizes["head_dim"], sizes["num_kv_heads"] * sizes["head_dim"]
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
