"""Heads of the speculators project, which vLLM serves without further options: eagle3, mtp, medusa; peagle is checked.

One directory: ``config.json`` says the kind (``speculators_model_type``), the layer as a nested transformers
configuration and how to serve it; ``model.safetensors`` has ``layers.0.*`` where EAGLE-3's authors say ``midlayer.*``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import torch

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.heads.file import build_network
from outrider.heads.formats.base import HeadFormat, Network, TargetFacts, check_target, identity, need_target
from outrider.heads.formats.copies import NAME as EMBEDDING
from outrider.heads.formats.dialect import Dialect, from_features, to_features
from outrider.heads.formats.eagle3 import FLAGS, IDS, read_network, stored_tensors
from outrider.heads.formats.layer import LAYER_FIELDS, llama_config, read_layer, read_vocabulary
from outrider.heads.formats.medusa import read_vllm
from outrider.heads.formats.output import write_files
from outrider.heads.formats.peagle import check_peagle
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal, check_known, check_names, load_floats, read_map
from outrider.heads.mtp import LAYER as MTP_LAYER
from outrider.heads.mtp import SPEC as MTP_SPEC
from outrider.heads.mtp import MtpConfig
from outrider.models.architectures import Fields
from outrider.models.base import FINAL_HIDDEN

KIND, LAYER_CONFIG, SERVING = "speculators_model_type", "transformer_layer_config", "speculators_config"
_PREFIX = "layers.0."
_DEFAULT_STEPS = 3
_COMMON = frozenset({KIND, LAYER_CONFIG, SERVING, "speculators_version"})
_EAGLE3 = frozenset({*FLAGS, IDS, "draft_vocab_size", "embed_requires_grad", "target_hidden_size", "enable_sp_ulysses"})
_MEDUSA = {
    "medusa_hidden_size": "hidden_size",
    "medusa_vocab_size": "vocab_size",
    "num_heads": "num_heads",
    "num_hidden_layers": "num_hidden_layers",
    "original_lm_head": "original_lm_head",
    "medusa_fc_bias": "medusa_fc_bias",
    "truncated_vocab_size": "truncated_vocab_size",
}
"""Field -> vLLM's field."""
_SERVING_FIELDS = frozenset({"algorithm", "default_proposal_method", "proposal_methods", "verifier"})


class Speculators(HeadFormat):
    """All kinds; the one that is written is eagle3."""

    name: ClassVar[str] = "speculators"
    summary: ClassVar[str] = "speculators' directories (eagle3, mtp, medusa), served by vLLM as they are"
    writes: ClassVar[tuple[str, ...]] = ("eagle3",)

    def detect(self, raw: RawHead) -> bool:
        return KIND in raw.config

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        where = str(raw.path)
        kind = Fields(raw.config, where).text(KIND)
        readers = {"eagle3": _read_eagle3, "peagle": _read_peagle, "mtp": _read_mtp, "medusa": _read_medusa}
        if kind not in readers:
            raise UnsupportedModelError(
                f"{where} is a speculator of kind '{kind}'; heads that Outrider reads are {', '.join(readers)}"
            )
        _check_serving(raw, kind)
        return readers[kind](raw, target)

    def write(self, network: Network, folder: Path, target: TargetFacts | None, dtype: torch.dtype) -> None:
        self.check_method(network)
        known = need_target(target, "speculators' files name the target and hold its embedding")
        check_target(network.config, known, "the head")
        tensors = {**stored_tensors(network, _PREFIX), EMBEDDING: known.embedding()}
        write_files(folder, tensors, _eagle3_config(network, known), dtype)


def _eagle3_config(network: Network, target: TargetFacts) -> dict[str, object]:
    config = network.config
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": max(_DEFAULT_STEPS, config.steps),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        KIND: "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config.draft_vocab_size,
        **{name: bool(getattr(config, name)) for name in FLAGS},
        "embed_requires_grad": False,
        "target_hidden_size": None,
        IDS: from_features(config.features, Dialect.VLLM),
        LAYER_CONFIG: {"architectures": ["LlamaForCausalLM"], **llama_config(config, target)},
        SERVING: {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "transformers_version": metadata.version("transformers"),
    }


def _check_serving(raw: RawHead, kind: str) -> None:
    serving = Fields(raw.config, str(raw.path)).mapping(SERVING)
    if unknown := sorted(set(serving) - _SERVING_FIELDS):
        raise ModelFileError(f"{raw.path}: '{SERVING}' has the unknown field '{unknown[0]}'")
    check_equal(serving, "algorithm", kind, raw.path)


def _steps(raw: RawHead) -> int:
    """Tokens that the first way of proposing drafts at once; the only one that vLLM looks at."""
    methods = Fields(raw.config, str(raw.path)).mapping(SERVING).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else 1


def _layer_config(raw: RawHead, ignored: frozenset[str] = frozenset()) -> dict[str, object]:
    """The nested configuration, checked, without the ``ignored`` fields."""
    where = str(raw.path)
    layer = {key: v for key, v in Fields(raw.config, where).mapping(LAYER_CONFIG).items() if key not in ignored}
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise UnsupportedModelError(f"{where}: the layer is of type '{layer['model_type']}', heads here are Llama's")
    check_known(layer, LAYER_FIELDS, f"{where} ({LAYER_CONFIG})")
    return layer


def eagle3_values(raw: RawHead) -> tuple[dict[str, bool], tuple[int, ...]]:
    """Flags and layer ids; ``norm_before_residual`` must be there, for engines take different values when it is not."""
    fields = Fields(raw.config, str(raw.path))
    if raw.config.get(FLAGS[0]) is None:
        raise ModelFileError(f"{raw.path}: the configuration lacks '{FLAGS[0]}', whose default differs between engines")
    return {name: fields.flag(name, False) for name in FLAGS}, fields.integers(IDS)


def _read_eagle3(raw: RawHead, target: TargetFacts | None) -> Network:
    where = str(raw.path)
    check_known(raw.config, _COMMON | _EAGLE3, where)
    flags, ids = eagle3_values(raw)
    if raw.config.get("embed_requires_grad") is True and target is None:
        need_target(target, f"{where} may have trained its embedding (embed_requires_grad), which must be compared")
    layer_config = _layer_config(raw)
    layer = read_layer(raw, layer_config, _PREFIX)
    check_equal(raw.config, "draft_vocab_size", raw.shape("lm_head.weight")[0], where)
    check_equal(raw.config, "target_hidden_size", layer["hidden_size"], where)
    features = to_features(ids, Dialect.VLLM, where) if ids else ()
    vocabulary = read_vocabulary(layer_config, raw, target)
    return read_network(raw, target, layer, flags, features, vocabulary, _steps(raw), _PREFIX)


def _read_peagle(raw: RawHead, target: TargetFacts | None) -> Network:
    check_known(raw.config, _COMMON | _EAGLE3 | {"mask_token_id"}, str(raw.path))
    flags, ids = eagle3_values(raw)
    layer_config = _layer_config(raw, frozenset({"num_hidden_layers"}))
    layers = Fields(raw.config, str(raw.path)).mapping(LAYER_CONFIG).get("num_hidden_layers")
    vocabulary = read_vocabulary(layer_config, raw, target)
    check_peagle(raw, layer_config, flags, len(ids) or _DEFAULT_STEPS, layers, vocabulary)
    raise UnsupportedModelError(
        f"{raw.path} is a complete P-EAGLE head, but Outrider has no network that drafts all depths in one pass; "
        "serve it with vLLM, or use an EAGLE-3 head of the same target"
    )


def _read_mtp(raw: RawHead, target: TargetFacts | None) -> Network:
    where = str(raw.path)
    check_known(raw.config, _COMMON | {"num_nextn_predict_layers"}, where)
    check_equal(raw.config, "num_nextn_predict_layers", 1, where)
    # The nested configuration is the target's own: how many layers the target has is not the head's business.
    layer_config = _layer_config(raw, frozenset({"num_hidden_layers", "layer_types"}))
    if any(kind != "full_attention" for kind in _layer_types(raw)):
        raise UnsupportedModelError(f"{where}: layer_types names other attention than full_attention")
    vocabulary = read_vocabulary(layer_config, raw, target)
    config = MtpConfig.model_validate(
        {
            **read_layer(raw, layer_config, f"{MTP_LAYER}."),
            "method": "mtp",
            "vocab_size": vocabulary,
            "draft_vocab_size": vocabulary,
            "features": (FINAL_HIDDEN,),
            "steps": _steps(raw),
            **identity(target),
        }
    )
    check_target(config, target, where)
    names = MTP_SPEC.expected(config.symbols(), config.flags())
    tensors = load_floats(raw, {name: name for name in names})
    check_names(raw, names)
    return build_network("mtp", config, tensors, where)


def _layer_types(raw: RawHead) -> list[object]:
    types = Fields(raw.config, str(raw.path)).mapping(LAYER_CONFIG).get("layer_types")
    return types if isinstance(types, list) else []


def _read_medusa(raw: RawHead, target: TargetFacts | None) -> Network:
    where = str(raw.path)
    rest = {key: value for key, value in raw.config.items() if key != "num_hidden_layers"}
    check_known(rest, _COMMON | set(_MEDUSA) | {"head_weight_decay"}, where)
    config = {theirs: raw.config[key] for key, theirs in _MEDUSA.items() if key in raw.config}
    fields = Fields(config, where)
    vocabulary = fields.integer("vocab_size")
    draft = fields.integer("truncated_vocab_size", 0) or vocabulary
    offsets = read_map(raw, draft, vocabulary)
    ids = None if offsets is None else (offsets, torch.arange(draft))
    maps = [name for name in ("d2t", "t2d") if name in raw.names]
    # Its configuration class shares the target's output matrix unless told otherwise, vLLM's does not.
    return read_vllm(raw, target, {"original_lm_head": True, **config}, vocabulary, ids, maps)
