"""Checks that every format shares: nothing unknown passes, and a configuration must agree with its tensors.

Structure is read from the tensors; configuration fields are compared with it. A field that is neither read, compared
nor known to be harmless is an error that names it: such flags change what a head computes (vLLM 38111, 46488).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.heads.file import draft_offsets
from outrider.heads.formats.raw import RawHead

HARMLESS = frozenset(
    {
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "has_no_defaults_at_init",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of transformers' configurations that do not change what a head computes, whatever they say."""

FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "layer_types": (None, ["full_attention"]),
    "logit_scale": (1.0, 1, None),
    "mlp_bias": (False, None),
    "num_hidden_layers": (1,),
    "parallel_drafting": (False, None),
    "partial_rotary_factor": (1.0, 1, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
}
"""Fields that may only have these values: anything else is a layer that our networks do not compute."""


def check_known(config: Mapping[str, object], known: Collection[str], where: object) -> None:
    """Refuse fields that nobody here reads, and values of ``FIXED`` fields that we do not compute.

    Args:
        known: fields that the format reads or compares itself.

    Raises:
        ModelFileError: naming the unknown field.
        UnsupportedModelError: naming the field whose value is not computed.
    """
    for key, value in config.items():
        # Qwen2's configurations state a window and whether it is used.
        is_unused = key == "sliding_window" and config.get("use_sliding_window") is False
        if key in FIXED and value not in FIXED[key] and not is_unused:
            raise UnsupportedModelError(f"{where}: the configuration says {key} = {value!r}, which heads here lack")
    unknown = sorted(set(config) - set(known) - HARMLESS - set(FIXED))
    if unknown:
        raise ModelFileError(
            f"{where}: the configuration has the unknown field '{unknown[0]}', which may change what the head "
            "computes; remove it if you know that it does not"
        )


def check_equal(config: Mapping[str, object], key: str, found: object, where: object) -> None:
    """Compare a field, where the configuration has it, with what the tensors say.

    Raises:
        ModelFileError: naming both.
    """
    value = config.get(key)
    if value is not None and value != found:
        raise ModelFileError(f"{where}: the configuration says {key} = {value!r}, the tensors say {found!r}")


def load_floats(raw: RawHead, renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """Read floating-point tensors.

    Args:
        renamed: stored name -> ours.

    Raises:
        ModelFileError: missing, or of another type.
    """
    tensors = {}
    for stored, ours in renamed.items():
        tensor = raw.tensor(stored)
        if not tensor.is_floating_point():
            raise ModelFileError(f"{raw.path}: tensor '{stored}' is {_short(tensor)}, it must be floating point")
        tensors[ours] = tensor
    return tensors


def check_names(raw: RawHead, used: Iterable[str]) -> None:
    """Refuse stored tensors that the format did not use.

    Raises:
        ModelFileError: naming the first.
    """
    if extra := sorted(raw.names - set(used)):
        raise ModelFileError(f"{raw.path} has an unknown tensor '{extra[0]}'; the head is of another format or variant")


def read_map(raw: RawHead, draft: int, vocabulary: int) -> Tensor | None:
    """``d2t`` as offsets int64 [Vd], checked with ``t2d``; ``None`` for a full vocabulary.

    Raises:
        ModelFileError: a reduced vocabulary without both, buffers that were never filled, maps that disagree.
    """
    where = raw.path
    if draft > vocabulary:
        raise ModelFileError(f"{where}: draft vocabulary {draft} is larger than the target's {vocabulary}")
    if draft == vocabulary:
        _check_full_map(raw, vocabulary)
        return None
    for name in ("d2t", "t2d"):
        if name not in raw.names:
            raise ModelFileError(
                f"{where} guesses {draft} of {vocabulary} tokens but has no map '{name}' of them; "
                "which tokens they are cannot be known"
            )
    offsets, chosen = raw.tensor("d2t"), raw.tensor("t2d")
    if offsets.dtype not in (torch.int64, torch.int32) or chosen.dtype is not torch.bool:
        raise ModelFileError(
            f"{where}: 'd2t' must hold integers and 't2d' booleans, they are {_short(offsets)} and {_short(chosen)}"
        )
    if tuple(offsets.shape) != (draft,) or tuple(chosen.shape) != (vocabulary,):
        raise ModelFileError(
            f"{where}: 'd2t' {list(offsets.shape)} and 't2d' {list(chosen.shape)} must be [{draft}] and [{vocabulary}]"
        )
    if not bool(offsets.any()):
        raise ModelFileError(f"{where}: 'd2t' is all zeros: it was never filled, the head's tokens cannot be known")
    ids = torch.arange(draft) + offsets.long()
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise ModelFileError(f"{where}: 'd2t' is not an ascending map into the target's {vocabulary} tokens")
    if int(chosen.sum()) != draft or not bool(chosen[ids].all()):
        raise ModelFileError(f"{where}: 'd2t' and 't2d' choose different tokens; one of them is from another head")
    return offsets.long()


def _check_full_map(raw: RawHead, vocabulary: int) -> None:
    """Projects store all zeros, or nothing, when nothing is left out (EAGLE issue 222)."""
    if "d2t" in raw.names:
        offsets = raw.tensor("d2t")
        if tuple(offsets.shape) != (vocabulary,) or bool(offsets.any()):
            raise ModelFileError(f"{raw.path}: 'd2t' maps a full vocabulary of {vocabulary} tokens to something else")
    if "t2d" in raw.names and tuple(raw.shape("t2d")) != (vocabulary,):
        raise ModelFileError(f"{raw.path}: 't2d' has shape {list(raw.shape('t2d'))}, not [{vocabulary}]")


def map_of_ids(raw: RawHead, name: str, draft: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """A list of target ids [Vd] in any order (vLLM's ``token_map``) -> ``d2t`` offsets and the rows' order [Vd].

    Raises:
        ModelFileError: missing, misshapen, repeated or out of range.
    """
    if name not in raw.names:
        raise ModelFileError(f"{raw.path} guesses {draft} of {vocabulary} tokens but has no map '{name}' of them")
    ids = raw.tensor(name)
    if ids.dtype not in (torch.int64, torch.int32) or tuple(ids.shape) != (draft,):
        raise ModelFileError(f"{raw.path}: '{name}' is {_short(ids)} {list(ids.shape)}, not integers [{draft}]")
    ids = ids.long()
    ascending, order = ids.sort()
    if bool((ascending[1:] == ascending[:-1]).any()) or int(ascending[0]) < 0 or int(ascending[-1]) >= vocabulary:
        raise ModelFileError(f"{raw.path}: '{name}' repeats a token or leaves the target's {vocabulary} tokens")
    return draft_offsets(ascending), order


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
