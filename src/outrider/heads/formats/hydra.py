"""Hydra heads as their authors store them (Ankner et al. 2024, arXiv 2402.05109), the ``mlp`` variant.

``hydra_lm_head.pt`` holds ``hydra_mlp.{head}.{block}.*``, ``hydra_lm_head.{head}.*`` and sometimes a copy of the
target's embedding. Hydra++ (``prefix-mlp``) has a decoder layer in front of the heads and is refused by name.
"""

from __future__ import annotations

import re
from typing import ClassVar

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.heads.file import build_network
from outrider.heads.formats.base import HeadFormat, Network, TargetFacts, check_target, identity, need_target
from outrider.heads.formats.copies import check_copy
from outrider.heads.formats.raw import RawHead
from outrider.heads.formats.strict import check_equal, check_known, check_names, load_floats
from outrider.heads.hydra import SPEC, HydraConfig

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.weight")
_EMBEDDING = "input_embed_fn.weight"
_FIELDS = frozenset(
    {
        "base_model_name_or_path",
        "dropout_rate",
        "grounded_heads",
        "hidden_state_offset",
        "hydra_head_arch",
        "hydra_num_heads",
        "hydra_num_layers",
    }
)


class OriginalHydra(HeadFormat):
    """Grounded ``mlp`` heads."""

    name: ClassVar[str] = "hydra"
    summary: ClassVar[str] = "Hydra's own files (grounded mlp heads)"

    def detect(self, raw: RawHead) -> bool:
        return any(name.startswith("hydra_mlp.") for name in raw.names)

    def read(self, raw: RawHead, target: TargetFacts | None) -> Network:
        where = str(raw.path)
        check_known(raw.config, _FIELDS, where)
        _refuse_variants(raw)
        blocks = [(int(m[1]), int(m[2])) for name in raw.names if (m := _BLOCK.fullmatch(name))]
        if not blocks:
            raise ModelFileError(f"{where} has no block 'hydra_mlp.0.0'; it is no Hydra head")
        heads, depth = 1 + max(head for head, _ in blocks), 1 + max(block for _, block in blocks)
        check_equal(raw.config, "hydra_num_heads", heads, where)
        check_equal(raw.config, "hydra_num_layers", depth, where)
        own = any(_OUTPUT.fullmatch(name) for name in raw.names)
        vocabulary = raw.shape("hydra_lm_head.0.weight")[0] if own else None
        if vocabulary is None:
            vocabulary = need_target(target, f"{where} has no output matrices").vocab_size
        config = HydraConfig.model_validate(
            {
                "method": "hydra",
                "hidden_size": raw.shape("hydra_mlp.0.0.linear.weight")[0],
                "vocab_size": vocabulary,
                "draft_vocab_size": vocabulary,
                "steps": heads,
                "blocks": depth,
                "own_output": own,
                "output_bias": "hydra_lm_head.0.bias" in raw.names,
                **identity(target),
            }
        )
        check_target(config, target, where)
        names = SPEC.expected(config.symbols(), config.flags())
        tensors = load_floats(raw, {name: name for name in names})
        check_names(raw, [*names, *_copy_of_embedding(raw, vocabulary, config.hidden_size, target)])
        return build_network("hydra", config, tensors, where)


def _refuse_variants(raw: RawHead) -> None:
    """Heads of other shapes than ``mlp``, or that do not read all tokens since the feature."""
    arch = raw.config.get("hydra_head_arch", "mlp")
    has_prefix = any(name.startswith("prefix_embeding_layer.") for name in raw.names)
    if arch != "mlp" or has_prefix:
        variant = "prefix-mlp" if has_prefix else arch
        raise UnsupportedModelError(
            f"{raw.path} is of Hydra's variant '{variant}', with layers in front of the heads; use an 'mlp' head"
        )
    if raw.config.get("grounded_heads", True) is not True:
        raise UnsupportedModelError(f"{raw.path}: grounded_heads is false; heads here read all new tokens")
    if raw.config.get("hidden_state_offset") not in (None, 0):
        raise UnsupportedModelError(f"{raw.path}: hidden_state_offset must be 0, heads here read the last hidden state")


def _copy_of_embedding(raw: RawHead, vocabulary: int, hidden: int, target: TargetFacts | None) -> list[str]:
    if _EMBEDDING not in raw.names:
        return []
    if raw.shape(_EMBEDDING) != (vocabulary, hidden):
        raise ModelFileError(f"{raw.path}: '{_EMBEDDING}' has shape {list(raw.shape(_EMBEDDING))}, not the target's")
    if target is not None:
        check_copy(raw, _EMBEDDING, target.embedding(), f"the embedding of '{target.name}'")
    return [_EMBEDDING]
