"""Small recurrent heads with random numbers, and the training form of their attention written out plainly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.heads.build import new_config
from outrider.heads.config import AttentionConfig, Feature
from outrider.heads.file import save_head
from outrider.heads.network import RecurrentNetwork
from outrider.heads.registry import network_class
from outrider.models.base import LanguageModel

SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "vocab_size": 20,
    "draft_vocab_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "intermediate_size": 16,
    "rope_theta": 100.0,
}
FEATURES: dict[str, tuple[Feature, ...]] = {"eagle": ("final",), "eagle3": (1, 2, 5)}


def fill(network: RecurrentNetwork, seed: int, scale: float = 0.4) -> RecurrentNetwork:
    """Random numbers everywhere, norms and biases included, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            factor = scale if parameter.dim() == 2 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * factor)
    return network.eval().requires_grad_(False)


def tiny_head(method: str, seed: int = 0, **fields: Any) -> RecurrentNetwork:
    """A head of ``SIZES``; one without an output matrix is bound to random rows."""
    cls = network_class(method)
    config = cls.Config.model_validate({"method": method, "features": FEATURES[method]} | SIZES | fields)
    network = fill(cls(config), seed)  # type: ignore[arg-type]
    if network.needs_target_rows:
        generator = torch.Generator().manual_seed(seed + 1)
        network.bind(torch.randn((config.draft_vocab_size, config.hidden_size), generator=generator))
    return network


def head_for(
    method: str, target: LanguageModel, draft_ids: Sequence[int] | None = None, seed: int = 0
) -> RecurrentNetwork:
    """A head with random numbers for ``target``, with a reduced vocabulary if one is given."""
    fields = {} if draft_ids is None else {"draft_vocab_size": len(draft_ids)}
    network = fill(network_class(method)(new_config(method, target, **fields)), seed)  # type: ignore[arg-type]
    network.draft_ids = None if draft_ids is None else torch.tensor(draft_ids)
    return network


def head_file(
    path: Path, method: str, target: LanguageModel, draft_ids: Sequence[int] | None = None, seed: int = 0
) -> Path:
    """The same, stored in float32."""
    save_head(path, head_for(method, target, draft_ids, seed), dtype=torch.float32)
    return path


# -- the training form -----------------------------------------------------------------------------------------


def rotated(x: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """Heads [n, heads, dim]: pair (i, i + dim / 2) of row t turned by positions[t] * theta^(-2 i / dim)."""
    half = x.shape[-1] // 2
    out = x.clone()
    for row, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(float(position)) * (1.0 / theta ** torch.tensor(2 * i / x.shape[-1]))
            cos, sin = angle.to(x.dtype).cos(), angle.to(x.dtype).sin()
            first, second = x[row, :, i], x[row, :, i + half]
            out[row, :, i], out[row, :, i + half] = first * cos - second * sin, second * cos + first * sin
    return out


class UnrolledAttention:
    """Attention of step i over whole rows: the keys of step 0 up to the row, and one key of each later step: its own.

    Row t of step i stands at position t + i (Li et al. 2025, training-time test).
    """

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        config, rows, step = self.config, len(queries), len(self.keys)
        positions = [row + step for row in range(rows)]
        q = rotated(queries.view(rows, config.num_heads, config.head_dim), positions, config.rope_theta)
        k = rotated(keys.view(rows, config.num_kv_heads, config.head_dim), positions, config.rope_theta)
        self.keys.append(k)
        self.values.append(values.view(rows, config.num_kv_heads, config.head_dim))
        out = torch.zeros_like(q)
        for row in range(rows):
            for head in range(config.num_heads):
                group = head // (config.num_heads // config.num_kv_heads)
                seen = [self.keys[0][s, group] for s in range(row + 1)] + [k[row, group] for k in self.keys[1:]]
                read = [self.values[0][s, group] for s in range(row + 1)] + [v[row, group] for v in self.values[1:]]
                scores = torch.stack([q[row, head] @ key for key in seen]) / config.head_dim**0.5
                out[row, head] = torch.softmax(scores, 0) @ torch.stack(read)
        return out.flatten(1)


def unrolled(
    network: RecurrentNetwork, embeddings: Tensor, features: Mapping[Feature, Tensor], steps: int
) -> list[Tensor]:
    """Outputs [T, H] of steps 0, 1, ... at the rows of ``features`` [T, H].

    ``embeddings`` [>= T + steps, H] are those of tokens 0, 1, ...: step i of row t reads token t + 1 + i.
    """
    attention = UnrolledAttention(network.config)
    state = network.fuse(features)
    outputs = []
    for step in range(steps):
        token = embeddings[1 + step : 1 + step + len(state)]
        outputs.append(network.step(token=token, state=state, attend=attention))
        state = network.recur(outputs[-1])
    return outputs
