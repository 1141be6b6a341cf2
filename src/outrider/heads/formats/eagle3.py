"""EAGLE-3 heads as their authors, SpecForge and SGLang store them.

Layout of Li et al. 2025 (arXiv 2503.01840): ``midlayer.*``, ``fc``, ``norm``, ``lm_head``, and of a reduced vocabulary
the maps ``d2t`` (offsets) and ``t2d``, with a Llama configuration. SpecForge's files for SGLang are the same without
the embedding, and count target layers one lower (``dialect.py``). ``norm_output`` means two things: vLLM and EAGLE-3.1
feed the normed state back; SpecForge's flag of that name only says that a norm comes before ``lm_head``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.heads.build import three_layers
from outrider.heads.config import Feature
from outrider.heads.eagle3 import LAYER, SPEC, Eagle3Config
from outrider.heads.file import MAP, build_network
from outrider.heads.formats.base import HeadFormat, Network, TargetFacts, check_target, identity, need_target
from outrider.heads.formats.copies import NAME as EMBEDDING
from outrider.heads.formats.copies import drop_embedding
from outrider.heads.formats.dialect import Dialect, from_features, to_features
from outrider.heads.formats.layer import LAYER_FIELDS, llama_config, read_layer, read_vocabulary
from outrider.heads.formats.output import vocabulary_maps, write_files
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal, check_known, check_names, load_floats, read_map
from outrider.models.architectures import Fields

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
IDS = "eagle_aux_hidden_state_layer_ids"
_STATED = frozenset({IDS, "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states"})
_FIELDS = LAYER_FIELDS | _STATED | {*FLAGS, "eagle_config"}
_EAGLE_FIELDS = frozenset({IDS, "use_aux_hidden_state", "norm_before_fc"})
_MAPS = ("d2t", "t2d")
SGLANG_ARCHITECTURE = "LlamaForCausalLMEagle3"


def read_network(
    raw: RawHead,
    target: TargetFacts | None,
    layer: Mapping[str, object],
    flags: Mapping[str, bool],
    ids: tuple[Feature, ...],
    vocabulary: int,
    steps: int = 1,
    prefix: str = f"{LAYER}.",
) -> Network:
    """An EAGLE-3 network from checked configuration values: what this format and speculators' share.

    Args:
        layer: as ``read_layer`` gives.
        flags: of ``FLAGS``; norms before ``fc`` must agree with the tensors.
        ids: features that the file names; empty for the default.
        prefix: of the layer's stored names.

    Raises:
        ModelFileError: tensors, maps and configuration that do not fit.
    """
    where = str(raw.path)
    hidden, inputs = raw.shape("fc.weight")
    if inputs % hidden:
        raise UnsupportedModelError(
            f"{where}: 'fc.weight' is [{hidden}, {inputs}]: the target's hidden size is another than the head's"
        )
    features = ids or three_layers(need_target(target, f"{where} does not name the target's layers").num_layers)
    if len(features) * hidden != inputs:
        raise ModelFileError(f"{where}: 'fc.weight' reads {inputs // hidden} hidden states, {len(features)} are named")
    draft = raw.shape("lm_head.weight")[0]
    found = {"norm_before_fc": "input_norm.weight" in raw.names, "fc_norm": "fc_norm.0.weight" in raw.names}
    for name, is_there in found.items():
        if flags[name] != is_there:
            raise ModelFileError(
                f"{where}: {name} is {flags[name]}, but its norm is {'' if is_there else 'not '}among the tensors"
            )
    config = Eagle3Config.model_validate(
        {
            **layer,
            **flags,
            "method": "eagle3",
            "vocab_size": vocabulary,
            "draft_vocab_size": draft,
            "features": features,
            "steps": steps,
            **identity(target),
        }
    )
    check_target(config, target, where)
    offsets = read_map(raw, draft, vocabulary)
    ignored = drop_embedding(raw, vocabulary, hidden, target)
    ours = SPEC.expected(config.symbols(), config.flags())
    stored = {(prefix + name[len(LAYER) + 1 :] if name.startswith(f"{LAYER}.") else name): name for name in ours}
    tensors = load_floats(raw, stored)
    check_names(raw, [*stored, *ignored, *_MAPS])
    return build_network("eagle3", config, tensors if offsets is None else {**tensors, MAP: offsets}, where)


def stored_tensors(network: Network, prefix: str = f"{LAYER}.") -> dict[str, Tensor]:
    """A network's tensors and maps under the names of this family."""
    own = network.state_dict()
    renamed = {(prefix + name[len(LAYER) + 1 :] if name.startswith(f"{LAYER}.") else name): own[name] for name in own}
    return {**renamed, **vocabulary_maps(network)}


class OriginalEagle3(HeadFormat):
    """The authors' layout; vLLM reads it with ``method: eagle3`` and takes layer ids as they are."""

    name: ClassVar[str] = "eagle3"
    summary: ClassVar[str] = "EAGLE-3 as its authors and SpecForge store it (vLLM reads it too)"
    writes: ClassVar[tuple[str, ...]] = ("eagle3",)
    dialect: ClassVar[Dialect] = Dialect.VLLM
    architecture: ClassVar[str] = "LlamaForCausalLM"

    def detect(self, raw: RawHead) -> bool:
        return _is_eagle3(raw) and raw.architecture != SGLANG_ARCHITECTURE

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        where = str(raw.path)
        check_known(raw.config, _FIELDS, where)
        inner = Fields(raw.config, where).mapping("eagle_config")
        if unknown := sorted(set(inner) - _EAGLE_FIELDS):
            raise ModelFileError(f"{where}: 'eagle_config' has the unknown field '{unknown[0]}'")
        fields, inner_fields = Fields(raw.config, where), Fields(inner, where)
        if not inner_fields.flag("use_aux_hidden_state", True):
            raise UnsupportedModelError(f"{where} reads the last hidden state only (use_aux_hidden_state false)")
        flags = {name: fields.flag(name, False) for name in FLAGS}
        flags["norm_before_fc"] = inner_fields.flag("norm_before_fc", flags["norm_before_fc"])
        self.check_flags(flags, where)
        ids = fields.integers(IDS) or inner_fields.integers(IDS)
        layer = read_layer(raw, raw.config, f"{LAYER}.")
        check_equal(raw.config, "draft_vocab_size", raw.shape("lm_head.weight")[0], where)
        check_equal(raw.config, "target_hidden_size", layer["hidden_size"], where)
        check_equal(raw.config, "num_aux_hidden_states", raw.shape("fc.weight")[1] // raw.shape("fc.weight")[0], where)
        features = to_features(ids, self.dialect, where) if ids else ()
        vocabulary = read_vocabulary(raw.config, raw, target)
        return read_network(raw, target, layer, flags, features, vocabulary)

    def check_flags(self, flags: Mapping[str, bool], where: str) -> None:
        """Refuse flags whose meaning cannot be known in this format."""

    def write(self, network: Network, folder: Path, target: TargetFacts | None, dtype: torch.dtype) -> None:
        self.check_method(network)
        tensors = stored_tensors(network)
        if target is not None:
            check_target(network.config, target, "the head")
            tensors |= self.embedding(target)
        write_files(folder, tensors, self.config(network, target), dtype)

    def embedding(self, target: TargetFacts) -> dict[str, Tensor]:
        """The copy of the target's embedding that makes the files complete by themselves."""
        return {EMBEDDING: target.embedding()}

    def config(self, network: Network, target: TargetFacts | None) -> dict[str, object]:
        """Every flag explicitly: engines differ in their defaults."""
        config = network.config
        ids = from_features(config.features, self.dialect)
        return {
            "architectures": [self.architecture],
            **llama_config(config, target),
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.hidden_size,
            "num_aux_hidden_states": len(ids),
            **{name: bool(getattr(config, name)) for name in FLAGS},
            "eagle_config": {IDS: ids, "use_aux_hidden_state": True},
            "tie_word_embeddings": False,
        }


class SglangEagle3(OriginalEagle3):
    """As SpecForge exports it for SGLang: no embedding, layer ids one lower."""

    name: ClassVar[str] = "sglang"
    summary: ClassVar[str] = "EAGLE-3 for SGLang, as SpecForge exports it"
    dialect: ClassVar[Dialect] = Dialect.SGLANG
    architecture: ClassVar[str] = SGLANG_ARCHITECTURE

    def detect(self, raw: RawHead) -> bool:
        return _is_eagle3(raw) and raw.architecture == SGLANG_ARCHITECTURE

    def check_flags(self, flags: Mapping[str, bool], where: str) -> None:
        if flags["norm_output"] and not flags["fc_norm"]:
            raise UnsupportedModelError(
                f"{where}: norm_output = True means 'a norm before lm_head' to SpecForge and 'the normed state is fed "
                "back' to others; set it to false for the first, or use --from eagle3 for the second"
            )

    def embedding(self, target: TargetFacts) -> dict[str, Tensor]:
        return {}


def _is_eagle3(raw: RawHead) -> bool:
    return f"{LAYER}.hidden_norm.weight" in raw.names and "speculators_model_type" not in raw.config
