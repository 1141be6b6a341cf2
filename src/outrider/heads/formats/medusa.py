"""Medusa heads: the original files, both generations, and vLLM's layout; speculators' is vLLM's with other maps.

Cai et al. 2024 (arXiv 2401.10774). Original names are ``{head}.{block}.linear.*`` and, in the first generation only,
``{head}.{blocks}.weight``, an output matrix of the head's own; a whole Medusa-2 model has them behind
``medusa_head.``. How many heads there are is what the tensors say: published configurations are known to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.heads.file import MAP, build_network
from outrider.heads.formats.base import HeadFormat, Network, TargetFacts, check_target, identity, need_target
from outrider.heads.formats.copies import check_copy
from outrider.heads.formats.output import write_files
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal, check_known, check_names, load_floats, map_of_ids
from outrider.heads.medusa import MedusaConfig
from outrider.models.architectures import Fields

_FULL_MODEL = "medusa_head."
_ORIGINAL = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_VLLM = re.compile(r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight)")
_ORIGINAL_FIELDS = frozenset({"medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version"})
_VLLM_FIELDS = frozenset(
    {
        "base_model_name_or_path",
        "hidden_size",
        "max_paths",
        "max_seq_len",
        "medusa_fc_bias",
        "medusa_num_heads",
        "medusa_num_layers",
        "num_heads",
        "num_hidden_layers",
        "original_lm_head",
        "topk",
        "truncated_vocab_size",
        "vocab_size",
    }
)
TOKEN_MAP = "token_map"


class OriginalMedusa(HeadFormat):
    """``medusa_lm_head.pt`` or ``.safetensors``, or a whole Medusa-2 model, of which only the heads are read."""

    name: ClassVar[str] = "medusa"
    summary: ClassVar[str] = "Medusa's own files, with output matrices of their own or the target's"

    def detect(self, raw: RawHead) -> bool:
        return any(_ORIGINAL.fullmatch(name) for name in raw.names)

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        where = str(raw.path)
        stored: dict[str, str] = {}
        for name in raw.names:
            if (match := _ORIGINAL.fullmatch(name)) is not None:
                stored[name] = f"{match[1]}.{match[2]}.{match[3]}"
        is_whole = any(name.startswith(_FULL_MODEL) for name in stored)
        if is_whole:
            _check_medusa_fields(raw)
            check_names(raw, [*stored, *(name for name in raw.names if not name.startswith(_FULL_MODEL))])
        else:
            check_known(raw.config, _ORIGINAL_FIELDS, where)
            check_names(raw, stored)
        heads, blocks, own = _structure(set(stored.values()), where)
        check_equal(raw.config, "medusa_num_layers", blocks, where)
        tensors = load_floats(raw, stored)
        stated = Fields(raw.config, where).optional_integer("vocab_size") if is_whole else None
        vocabulary = tensors[f"0.{blocks}.weight"].shape[0] if own else stated
        if vocabulary is None:
            vocabulary = need_target(target, f"{where} has no output matrices, nor says its vocabulary").vocab_size
        return medusa_network(raw, target, tensors, (heads, blocks, own), vocabulary, None)


class VllmMedusa(HeadFormat):
    """``blocks.{head}.layers.{block}``, ``lm_heads.{head}``, and ``token_map``, the ids of a reduced vocabulary."""

    name: ClassVar[str] = "vllm-medusa"
    summary: ClassVar[str] = "Medusa for vLLM"
    writes: ClassVar[tuple[str, ...]] = ("medusa",)

    def detect(self, raw: RawHead) -> bool:
        is_vllm = any(_VLLM.fullmatch(name) for name in raw.names)
        return is_vllm and "speculators_model_type" not in raw.config

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        where = str(raw.path)
        config = raw.config
        without_layers = {key: value for key, value in config.items() if key != "num_hidden_layers"}
        check_known(without_layers, _VLLM_FIELDS, where)
        fields = Fields(config, where)
        vocabulary = fields.integer("vocab_size")
        draft = fields.integer("truncated_vocab_size", vocabulary)
        ids = map_of_ids(raw, TOKEN_MAP, draft, vocabulary) if draft < vocabulary else None
        extra = [TOKEN_MAP] if ids is not None else []
        return read_vllm(raw, target, config, vocabulary, ids, extra)

    def write(self, network: Network, folder: Path, target: TargetFacts | None, dtype: torch.dtype) -> None:
        self.check_method(network)
        config = network.config
        check_target(config, target, "the head")
        tensors: dict[str, Tensor] = {}
        for name, tensor in network.state_dict().items():
            head, block, rest = name.split(".", 2)
            is_block = rest.startswith("linear.")
            renamed = f"blocks.{head}.layers.{block}.{rest[7:]}" if is_block else f"lm_heads.{head}.{rest}"
            tensors[renamed] = tensor
        if network.draft_ids is not None:
            tensors[TOKEN_MAP] = network.draft_ids
        if not config.own_output:
            rows = need_target(target, "vLLM wants a copy of the target's output matrix in the file").output()
            tensors["lm_heads.0.weight"] = rows if network.draft_ids is None else rows[network.draft_ids]
        write_files(folder, tensors, _vllm_config(config), dtype)


def _vllm_config(config: MedusaConfig) -> dict[str, object]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.steps,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": True,  # else vLLM drops the biases without a word
        "original_lm_head": not config.own_output,
        "max_paths": 64,
        "topk": 10,
    }


def read_vllm(
    raw: RawHead,
    target: TargetFacts | None,
    config: Mapping[str, object],
    vocabulary: int,
    ids: tuple[Tensor, Tensor] | None,
    extra: Sequence[str],
) -> Network:
    """A network from tensors in vLLM's names.

    Args:
        config: fields of ``_VLLM_FIELDS``.
        ids: ``d2t`` offsets and the order that sorts the rows, of a reduced vocabulary.
        extra: stored names that the caller has used.

    Raises:
        ModelFileError: tensors and configuration that do not fit.
    """
    where = str(raw.path)
    stored, outputs = {}, {}
    for name in raw.names:
        match = _VLLM.fullmatch(name)
        if match is not None and match[4] is not None:
            outputs[name] = match[4]
        elif match is not None:
            stored[name] = f"{match[1]}.{match[2]}.linear.{match[3]}"
    check_names(raw, [*stored, *outputs, *extra])
    fields = Fields(config, where)
    tensors = load_floats(raw, stored)
    is_shared = fields.flag("original_lm_head", False)
    heads, blocks, _ = _structure({name for name in tensors if name.endswith("weight")}, where)
    _add_biases(tensors, fields.flag("medusa_fc_bias", False), where)
    check_equal(config, "num_hidden_layers", blocks, where)
    check_equal(config, "num_heads", heads, where)
    check_equal(config, "hidden_size", tensors["0.0.linear.weight"].shape[0], where)
    if is_shared:
        _check_shared(raw, outputs, target, vocabulary, ids)
    else:
        for name, head in outputs.items():
            tensors[f"{head}.{blocks}.weight"] = _rows(load_floats(raw, {name: name})[name], ids)
    offsets = None if ids is None else ids[0]
    return medusa_network(raw, target, tensors, (heads, blocks, not is_shared), vocabulary, offsets)


def medusa_network(
    raw: RawHead,
    target: TargetFacts | None,
    tensors: dict[str, Tensor],
    structure: tuple[int, int, bool],
    vocabulary: int,
    offsets: Tensor | None,
) -> Network:
    """A network from tensors in our names; ``structure`` is (heads, blocks, output matrices of their own)."""
    heads, blocks, own = structure
    config = MedusaConfig.model_validate(
        {
            "method": "medusa",
            "hidden_size": tensors["0.0.linear.weight"].shape[0],
            "vocab_size": vocabulary,
            "draft_vocab_size": vocabulary if offsets is None else len(offsets),
            "steps": heads,
            "blocks": blocks,
            "own_output": own,
            **identity(target),
        }
    )
    check_target(config, target, raw.path)
    return build_network("medusa", config, tensors if offsets is None else {**tensors, MAP: offsets}, str(raw.path))


def _structure(names: set[str], where: str) -> tuple[int, int, bool]:
    """Heads, blocks of each, and whether heads have output matrices, of names like ``0.0.linear.weight``."""
    if "0.0.linear.weight" not in names:
        raise ModelFileError(f"{where} has no first block of a first head; it is no Medusa head")
    heads = 1 + max(int(name.split(".")[0]) for name in names)
    blocks = sum(1 for name in names if name.startswith("0.") and name.endswith(".linear.weight"))
    return heads, blocks, any(not name.split(".", 2)[2].startswith("linear.") for name in names)


def _check_medusa_fields(raw: RawHead) -> None:
    """Of a whole model's configuration only what is about the heads matters here."""
    mine = {key: value for key, value in raw.config.items() if key.startswith("medusa")}
    check_known(mine, _ORIGINAL_FIELDS, raw.path)


def _add_biases(tensors: dict[str, Tensor], is_stated: bool, where: str) -> None:
    """Blocks without bias get zeros; biases that vLLM would drop are an error."""
    has_biases = any(name.endswith(".bias") for name in tensors)
    if has_biases != is_stated:
        what = "biases" if has_biases else "no biases"
        raise ModelFileError(f"{where}: medusa_fc_bias is {is_stated}, but there are {what} among the tensors")
    if not has_biases:
        for name in [name for name in tensors if name.endswith(".linear.weight")]:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(tensors[name].shape[0])


def _rows(matrix: Tensor, ids: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rows of the draft vocabulary in ascending order: of a matrix over it, or over the whole vocabulary."""
    if ids is None:
        return matrix
    offsets, order = ids
    if matrix.shape[0] > len(offsets):
        return matrix[torch.arange(len(offsets)) + offsets]
    return matrix[order] if matrix.shape[0] == len(order) else matrix


def _check_shared(
    raw: RawHead,
    outputs: Mapping[str, str],
    target: TargetFacts | None,
    vocabulary: int,
    ids: tuple[Tensor, Tensor] | None,
) -> None:
    """A copy of the target's output matrix, or of its rows, in the file: compared, not kept."""
    if sorted(outputs.values()) not in ([], ["0"]):
        raise ModelFileError(f"{raw.path}: original_lm_head is true, but there are {len(outputs)} output matrices")
    for name in outputs:
        rows = raw.shape(name)[0]
        draft = vocabulary if ids is None else len(ids[0])
        if rows not in (draft, vocabulary):
            raise ModelFileError(f"{raw.path}: tensor '{name}' has {rows} rows, not {draft} or {vocabulary}")
        if target is not None:
            theirs = target.output()
            if ids is not None and rows < vocabulary:
                offsets, order = ids
                stored_ids = (torch.arange(len(offsets)) + offsets)[order.argsort()]
                theirs = theirs[stored_ids]
            check_copy(raw, name, theirs, f"the output matrix of '{target.name}'")
