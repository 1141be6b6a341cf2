"""Which transformers models the fallback runs, decided from the configuration first and from behaviour last.

Speculation needs keys and values that can be taken back one position at a time. Recurrent, convolutional and
encoder-decoder models are refused before any weight is read; a model that passes is still compared with itself
(``self_check``), because an architecture that ignores a 4-D mask or explicit positions would be silently wrong.
Windows above ``_LONGEST_CHECK`` positions are not reached by that comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from outrider.errors import UnsupportedModelError
from outrider.models.architectures import is_recurrent, refuse
from outrider.models.base import LanguageModel, Segment, tree_segment
from outrider.trees.token_tree import TokenTree

_LAYER_CLASSES = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
_KNOWN_KINDS = ("full_attention", "sliding_attention")
_UNKNOWN_WINDOWS = ("window_size", "attention_window", "attention_chunk_size")
_LONGEST_CHECK = 512
_CHILDREN = 6
# Rounding at most: in 32 bits; in 16 bits, where products round differently for one row and for many; the same where
# only the tokens differ, which separates a leak from rounding.
_WIDE_GAP, _NARROW_GAP, _NARROW_LEAK = 2e-3, 0.1, 0.02
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
_NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """``windows`` maps each kind of layer to its sliding window or None; ``has_entries[i]``: does layer i store any."""

    windows: dict[str, int | None]
    has_entries: tuple[bool, ...]


def check_config(config: PretrainedConfig) -> None:
    """Refuse, from the configuration alone, a model whose state cannot be rolled back.

    Raises:
        UnsupportedModelError: saying which property is the obstacle.
    """
    kind = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"'{kind}' is an encoder-decoder model, but Outrider runs causal language models; give a decoder-only one"
        )
    text = config.get_text_config(decoder=True)
    layer_types = getattr(text, "layer_types", None) or ()
    if is_recurrent(kind, layer_types) or is_recurrent(str(text.model_type), layer_types):
        refuse(kind, layer_types)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(
            f"'{kind}' keeps a state that cannot be taken back after rejected tokens (transformers calls it stateful), "
            "so speculation would not be exact; use an attention-only model"
        )
    attention_layout(config)


def attention_layout(config: PretrainedConfig) -> AttentionLayout:
    """Which layers store entries and which mask each one sees, from the cache that transformers itself would build.

    Raises:
        UnsupportedModelError: for a layer that is neither full nor sliding-window attention.
    """
    text = config.get_text_config(decoder=True)
    for name in _UNKNOWN_WINDOWS:
        if isinstance(getattr(text, name, None), int):
            raise UnsupportedModelError(
                f"'{config.model_type}' limits attention in a way that Outrider cannot put into a mask ('{name}'); "
                "use a model with full or sliding-window attention"
            )
    try:
        layers = DynamicCache(config=text).layers
    except (KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"transformers has no cache of keys and values for '{config.model_type}' ({error}); use another model"
        ) from error
    odd = {type(layer).__name__ for layer in layers if type(layer) not in _LAYER_CLASSES}
    named = [str(kind) for kind in getattr(text, "layer_types", None) or ()]
    odd |= set(named) - set(_KNOWN_KINDS)
    spans = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]
    kinds = named or ["full_attention" if span is None else "sliding_attention" for span in spans]
    found = {span for span in spans if span is not None}
    if odd or not layers or len(found) > 1:
        what = ", ".join(sorted(odd)) or ("windows of several sizes" if found else "no attention layers")
        raise UnsupportedModelError(
            f"'{config.model_type}' has {what}: not just full and equal sliding-window attention, so Outrider cannot "
            "roll its state back exactly; use an attention-only model"
        )
    window = next(iter(found), getattr(text, "sliding_window", None))
    windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
    return AttentionLayout(windows, tuple(not isinstance(layer, DummyLayer) for layer in layers))


def context_length(config: PretrainedConfig) -> int:
    """Positions at most; where rotary scaling depends on the text's length, the length up to which it does not.

    A longer text would turn cached keys by other angles than new ones, so its output would depend on how it was cut.
    """
    text = config.get_text_config(decoder=True)
    values = [getattr(text, name, None) for name in _CONTEXT_NAMES]
    longest = next((value for value in values if isinstance(value, int) and value > 0), _NO_LIMIT)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # one for each kind of layer
        if each.get("rope_type", each.get("type")) in _LENGTH_DEPENDENT_ROPES:
            name = "original_max_position_embeddings"
            longest = min(longest, int(each.get(name) or getattr(text, name, None) or longest))
    return longest


def self_check(model: LanguageModel, plain: Callable[[Sequence[int]], Tensor], layout: AttentionLayout) -> None:
    """Compare a tree pass, a commit and a step with plain forwards of the same text, on random tokens.

    Args:
        plain: tokens -> logits [n, vocab_size] of the model run without cache, mask or positions.

    Raises:
        UnsupportedModelError: when they differ by more than rounding, or the model raises.
    """
    windows = [window for window in layout.windows.values() if window is not None]
    beyond = min((w + 3 for w in windows if w <= _LONGEST_CHECK), default=0)
    prompt_length = min(max(4, beyond), model.context_length - 4)
    if prompt_length < 1 or model.vocab_size < 2 * _CHILDREN + 1:
        raise UnsupportedModelError(
            f"{model.name}: {model.context_length} positions and {model.vocab_size} tokens are too few to check it; "
            "use a larger model"
        )
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(model.vocab_size, (prompt_length,), generator=generator).tolist()
    distinct = torch.randperm(min(model.vocab_size, 1 << 16), generator=generator).tolist()
    distinct = distinct[: 2 * _CHILDREN + 1]
    try:
        gap, leak, is_wide = _measure(model, plain, drawn, distinct)
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, LookupError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            f"{model.name} cannot be run on a token tree: its transformers model does not take a 4-D mask, explicit "
            f"positions or Outrider's cache ({reason[0][:160]}); use a model of another architecture"
        ) from error
    if not (gap <= (_WIDE_GAP if is_wide else _NARROW_GAP) and leak <= (_WIDE_GAP if is_wide else _NARROW_LEAK)):
        raise UnsupportedModelError(
            f"{model.name} gives other logits on a token tree than on plain text (relative gap {gap:.2g}, and "
            f"{leak:.2g} where they must agree): its transformers model ignores masks, positions or the cache, so "
            "speculation would not be exact; use a model of another architecture"
        )


def _measure(
    model: LanguageModel, plain: Callable[[Sequence[int]], Tensor], prompt: list[int], tokens: list[int]
) -> tuple[float, float, bool]:
    """(gap to plain forwards, what unrelated tokens change, whether the model computes in 32 bits or more)."""
    root, step, children = tokens[0], tokens[1], tokens[2 : 2 + _CHILDREN]
    tree = _fan(root, children)
    cache = model.new_cache()
    model.forward([Segment(cache, prompt, logit_rows=())])
    cache.commit(range(len(prompt)))
    # Rows in reverse order, so that a model that cannot return chosen rows is found out as well.
    rows = list(range(len(tree)))[::-1]
    with cache.speculation():
        others = _fan(root, [*tokens[2 + _CHILDREN :], children[-1]])
        beside = model.forward([tree_segment(cache, others, (len(others) - 1, 0))])[0].logits
    ours = model.forward([tree_segment(cache, tree, rows)])[0].logits
    cache.commit((0, len(tree) - 1))
    after = model.forward([Segment(cache, [step])])[0].logits
    wanted = [plain([*prompt, root, child]) for child in reversed(children)]
    last = plain([*prompt, root, children[-1], step])
    gaps = _relative(torch.cat([ours, after]), torch.stack([*(each[-1] for each in wanted), last[-3], last[-1]]))
    # Texts of equal shape that differ only in tokens that a row must not see: no rounding but a router's.
    leak = torch.cat([_relative(beside, ours[[0, -1]]), _relative(wanted[0][-2:-1], wanted[1][-2:-1])])
    is_wide = ours.dtype in (torch.float32, torch.float64)
    # In 16 bits a mixture of experts may send single rows to another expert for a rounding.
    return float(gaps.max() if is_wide else gaps.median()), float(leak.max()), is_wide


def _fan(root: int, children: Sequence[int]) -> TokenTree:
    tree = TokenTree(root)
    for token in children:
        tree.add(0, token)
    return tree


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    """Distances [n] of rows of logits, relative to each row's spread."""
    found, wanted = found.float(), wanted.float()
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
    distances: Tensor = (found - wanted).norm(dim=-1) / spread
    return distances
