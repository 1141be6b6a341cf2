"""Which architectures our decoder runs, why the others are refused, and checks that every file format shares.

Does not know any file format: it sees dictionaries, configurations and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from outrider.errors import ModelFileError, UnsupportedModelError
from outrider.models.config import DecoderConfig

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
"""Families that ``models/decoder.py`` runs (``DecoderConfig.family``)."""

ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")
"""Rotary scaling rules of transformers that ``models/rope.py`` implements."""

FALLBACK_HINT = "give the model as a transformers directory or hub name and run it through transformers with --fallback"

_RECURRENT_FAMILIES = (
    *("mamba", "jamba", "zamba", "rwkv", "recurrent_gemma", "bamba", "granitehybrid", "granitemoehybrid", "nemotron_h"),
    *("falcon_h1", "falcon-h1", "lfm2", "plamo2", "plamo3", "qwen3_next", "qwen3next", "qwen3_5", "qwen35", "xlstm"),
    *("kimi_linear", "kimi-linear", "minimax", "griffin", "hyena", "retnet", "gated_deltanet", "olmo_hybrid"),
)
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rglru", "lightning_attention")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LARGEST = {"num_layers": 1024, "vocab_size": 1 << 24, "num_heads": 4096, "head_dim": 4096}
_LARGEST_WIDTH = 1 << 20
_LARGEST_INTEGER = 1 << 63
_LARGEST_NUMBER = 1e300


def is_recurrent(architecture: str, layer_types: Iterable[object] = ()) -> bool:
    """Whether an architecture (``model_type`` or GGUF name) keeps state that cannot be rolled back."""
    name = architecture.lower()
    if any(family in name for family in _RECURRENT_FAMILIES):
        return True
    return any(str(kind).startswith(_RECURRENT_LAYERS) for kind in layer_types)


def count_experts(config: Mapping[str, object]) -> int:
    """Experts of a mixture-of-experts ``config.json``, 0 for a dense model."""
    counts = [config.get(key) for key in _EXPERT_KEYS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def refuse(architecture: str, layer_types: Iterable[object] = (), experts: int = 0) -> NoReturn:
    """Say why ``architecture`` is not run by our decoder, and what to do.

    Raises:
        UnsupportedModelError: always.
    """
    if is_recurrent(architecture, layer_types):
        raise UnsupportedModelError(
            f"the architecture '{architecture}' keeps a recurrent state that cannot be rolled back after rejected "
            f"tokens, so speculation would not be exact; use an attention-only model ({', '.join(SUPPORTED)})"
        )
    if experts or "moe" in architecture.lower() or architecture.lower() == "mixtral":
        raise UnsupportedModelError(
            f"the architecture '{architecture}' is a mixture of experts, which Outrider's decoder does not run "
            f"(it runs dense {', '.join(SUPPORTED)}); {FALLBACK_HINT}"
        )
    raise UnsupportedModelError(
        f"the architecture '{architecture}' is not one that Outrider's decoder runs ({', '.join(SUPPORTED)}); "
        f"{FALLBACK_HINT}"
    )


def refuse_feature(feature: str) -> NoReturn:
    """Refuse a model of a known family for one feature, such as ``"hidden_act 'relu'"``.

    Raises:
        UnsupportedModelError: always.
    """
    raise UnsupportedModelError(f"Outrider's decoder does not run a model with {feature}; {FALLBACK_HINT}")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed reading of a model's metadata; every complaint names ``source`` and the field.

    All readers return ``default`` for an absent (or null) field when one is given.

    Raises:
        ModelFileError: a field is absent without default, or has the wrong type.
    """

    values: Mapping[str, object]
    source: str

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _LARGEST_INTEGER:
            self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "a number", value)
        # Compared before converting: an integer may be too large for a float; NaN compares false.
        if not -_LARGEST_NUMBER < value < _LARGEST_NUMBER:
            self._wrong(key, "a finite number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default, "a text")
        if not isinstance(value, str):
            self._wrong(key, "a text", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def mapping(self, key: str) -> Mapping[str, object]:
        """A nested dictionary; empty when absent or null."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self._wrong(key, "a dictionary", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """An integer or a list of them; empty when absent or null."""
        value = self.values.get(key)
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            self._wrong(key, "an integer or a list of integers", value)
        return tuple(items)

    def _value(self, key: str, default: object, wanted: str) -> object:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.source} lacks '{key}' ({wanted}); download the model again")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> NoReturn:
        raise ModelFileError(f"{self.source}: '{key}' must be {wanted}, not {str(value)[:60]!r}; the file is damaged")


def check_config(config: DecoderConfig, source: str) -> DecoderConfig:
    """Return ``config`` when its sizes are plausible and agree with each other.

    Raises:
        ModelFileError: a size is not positive, absurdly large, or contradicts another one.
    """
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    for name in (*sizes, "context_length"):
        value = int(getattr(config, name))
        largest = _LARGEST.get(name, 1 << 31 if name == "context_length" else _LARGEST_WIDTH)
        if not 1 <= value <= largest:
            _contradiction(source, f"{name} is {value}, outside 1..{largest}")
    if config.num_heads % config.num_kv_heads:
        _contradiction(source, f"{config.num_heads} heads cannot share {config.num_kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        _contradiction(source, f"head_dim is {config.head_dim}, but rotary embedding needs an even one")
    if len(config.windows) != config.num_layers:
        _contradiction(source, f"{len(config.windows)} layer types for {config.num_layers} layers")
    if any(window is not None and window < 1 for window in config.windows):
        _contradiction(source, "a sliding window is below 1")
    positive = [("norm_eps", config.norm_eps), ("qk_scale", config.qk_scale)]
    positive += [("rope theta", config.rope_full.theta), ("rope theta", config.rope_sliding.theta)]
    positive += [(k, v) for k in ("attention_soft_cap", "final_soft_cap") if (v := getattr(config, k)) is not None]
    for name, number in positive:
        if not (math.isfinite(number) and number > 0):
            _contradiction(source, f"{name} is {number}, but must be positive")
    return config


def _contradiction(source: str, what: str) -> NoReturn:
    raise ModelFileError(f"{source}: {what}; the file is damaged or not a language model's")
