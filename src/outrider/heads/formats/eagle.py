"""EAGLE-1 and EAGLE-2 heads as their authors, SGLang and vLLM store them, and HASS's variant with two more norms.

One layout (Li et al. 2024, arXiv 2401.15077): ``fc``, ``layers.0.*`` without its first norm, usually a copy of the
target's embedding, no output matrix. The authors' own loader skips names that it does not know; this one refuses them.
Old vLLM files nest the Llama configuration under ``model`` and add a copy of the output matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.heads.eagle import LAYER, SPEC, EagleConfig
from outrider.heads.file import build_network
from outrider.heads.formats.base import HeadFormat, Network, TargetFacts, check_target, identity
from outrider.heads.formats.copies import check_copy, drop_embedding
from outrider.heads.formats.layer import LAYER_FIELDS, read_layer, read_vocabulary
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal, check_known, check_names, load_floats
from outrider.models.base import FINAL_HIDDEN

_OUTPUT = "lm_head.weight"
_FLAGS = {
    "fc_bias": (("bias", "eagle_fc_bias"), "fc.bias"),
    "qkv_bias": (("attention_bias", "qkv_bias"), f"{LAYER}.self_attn.q_proj.bias"),
    "para_norm": (("add_para_norm",), "embedding_layernorm.weight"),
}
"""Our flag -> fields that state it, and the tensor that shows it."""

_FIELDS = LAYER_FIELDS | {field for fields, _ in _FLAGS.values() for field in fields}


class OriginalEagle(HeadFormat):
    """EAGLE-1/2; the flags of the network follow from the tensors."""

    name: ClassVar[str] = "eagle"
    summary: ClassVar[str] = "EAGLE-1/2 as its authors, SGLang and vLLM store it; HASS"

    def detect(self, raw: RawHead) -> bool:
        is_eagle = "fc.weight" in raw.names and f"{LAYER}.self_attn.q_proj.weight" in raw.names
        return is_eagle and f"{LAYER}.hidden_norm.weight" not in raw.names

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        where = str(raw.path)
        stated = _flat(raw)
        check_known({key: value for key, value in stated.items() if key != "attention_bias"}, _FIELDS, where)
        hidden, inputs = raw.shape("fc.weight")
        if inputs != 2 * hidden:
            raise UnsupportedModelError(f"{where}: 'fc.weight' reads {inputs} inputs, EAGLE's {2 * hidden}")
        flags = {flag: tensor in raw.names for flag, (_, tensor) in _FLAGS.items()}
        for flag, (fields, _) in _FLAGS.items():
            for field in fields:
                check_equal(stated, field, flags[flag], where)
        vocabulary = read_vocabulary(stated, raw, target)
        config = EagleConfig.model_validate(
            {
                **read_layer(raw, stated, f"{LAYER}."),
                **flags,
                "method": "eagle",
                "vocab_size": vocabulary,
                "draft_vocab_size": vocabulary,
                "features": (FINAL_HIDDEN,),
                **identity(target),
            }
        )
        check_target(config, target, where)
        copies = drop_embedding(raw, vocabulary, hidden, target) | _drop_output(raw, vocabulary, hidden, target)
        names = SPEC.expected(config.symbols(), config.flags())
        tensors = load_floats(raw, {name: name for name in names})
        check_names(raw, [*names, *copies])
        return build_network("eagle", config, tensors, where)


def _flat(raw: RawHead) -> Mapping[str, object]:
    """The configuration, with vLLM's nested ``model`` unfolded."""
    inner = raw.config.get("model")
    if raw.config.get("model_type") != "eagle" or not isinstance(inner, Mapping):
        return raw.config
    outer = {key: value for key, value in raw.config.items() if key not in ("model", "method", "model_type")}
    check_equal(outer, "truncated_vocab_size", inner.get("vocab_size"), raw.path)
    outer.pop("truncated_vocab_size", None)
    return {**inner, **outer}


def _drop_output(raw: RawHead, vocabulary: int, hidden: int, target: TargetFacts | None) -> frozenset[str]:
    """A copy of the target's output matrix, compared like the embedding."""
    if _OUTPUT not in raw.names:
        return frozenset()
    if raw.shape(_OUTPUT) != (vocabulary, hidden):
        raise ModelFileError(f"{raw.path}: '{_OUTPUT}' has shape {list(raw.shape(_OUTPUT))}, not the target's")
    if target is not None:
        check_copy(raw, _OUTPUT, target.output(), f"the output matrix of '{target.name}'")
    return frozenset({_OUTPUT})
