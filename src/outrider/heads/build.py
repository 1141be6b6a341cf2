"""A new head for a target: its configuration from the target's sizes, its numbers untrained."""

from __future__ import annotations

from typing import Any

from outrider.heads.config import AttentionConfig, Feature, HeadConfig
from outrider.heads.exit import ExitConfig
from outrider.heads.network import DraftNetwork
from outrider.heads.registry import network_class
from outrider.models.base import FINAL_HIDDEN, LanguageModel
from outrider.models.decoder import Decoder


def three_layers(num_layers: int) -> tuple[Feature, ...]:
    """EAGLE-3's hidden states: the inputs of blocks 2, L // 2 and L - 3 (Li et al. 2025), in range for small models."""
    return tuple(dict.fromkeys(max(0, min(num_layers - 1, layer)) for layer in (2, num_layers // 2, num_layers - 3)))


def exit_block(num_layers: int) -> int:
    """Where an early exit leaves unless told otherwise: after two blocks as in Kangaroo, in range for small models."""
    return max(1, min(2, num_layers - 1))


def new_config(method: str, target: LanguageModel, **fields: Any) -> HeadConfig:
    """A configuration for ``target``; ``fields`` override what follows from it.

    Raises:
        UnknownNameError: for an unknown method.
    """
    cls = network_class(method).Config
    is_fused = method == "eagle3"
    values: dict[str, Any] = {
        "method": method,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "features": three_layers(target.num_layers) if is_fused else (FINAL_HIDDEN,),
    }
    if issubclass(cls, AttentionConfig):
        values |= _layer_sizes(target)
    if issubclass(cls, ExitConfig):
        values |= {"features": (exit_block(target.num_layers),), "intermediate_size": 3 * target.hidden_size}
    return cls.model_validate(values | fields)


def untrained_head(method: str, target: LanguageModel, seed: int = 0, **fields: Any) -> DraftNetwork[Any]:
    """A head with the numbers that training would start from, in evaluation mode; ``fields`` as for ``new_config``."""
    network = network_class(method)(new_config(method, target, **fields))
    start_network(network, target, seed)
    return network.eval().requires_grad_(False)


def start_network(network: DraftNetwork[Any], target: LanguageModel, seed: int) -> None:
    """The numbers that training starts from: drawn, but for a final norm, which is the target's where it has one."""
    network.initialise(seed)
    if isinstance(target, Decoder):
        network.adopt_final_norm(target.final_norm)


def _layer_sizes(target: LanguageModel) -> dict[str, Any]:
    """A transformer layer like the target's; for targets without one of ours, a plain one."""
    if isinstance(target, Decoder):
        config = target.config
        return {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "norm_eps": config.norm_eps,
            "rope_theta": config.rope_full.theta,
            "rope_scaling": config.rope_full.scaling,
            "context_length": config.context_length,
        }
    head_dim = 64 if target.hidden_size % 64 == 0 else 4
    heads = max(1, target.hidden_size // head_dim)
    return {
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": 3 * target.hidden_size,
        "context_length": target.context_length,
    }
