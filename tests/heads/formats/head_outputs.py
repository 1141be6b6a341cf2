"""What a head computes on fixed inputs: the same before and after its files went through another format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.heads.network import DraftNetwork, RecurrentNetwork
from outrider.heads.per_depth import PerDepthNetwork


def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Stands for attention: depends on all three, whatever the numbers of heads."""
    return queries + keys.mean() * values.std()


def logits_of(network: DraftNetwork[Any]) -> Tensor:
    """Logits of every head, or of two recurrent steps, for four fixed rows: [steps, 4, Vd]."""
    config = network.config
    generator = torch.Generator().manual_seed(0)
    if network.needs_target_rows:
        network.bind(torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator))
    features = {name: torch.randn(4, config.hidden_size, generator=generator) for name in config.features}
    tokens = [torch.randn(4, config.hidden_size, generator=generator) for _ in range(max(2, config.steps))]
    if isinstance(network, RecurrentNetwork):
        state, found = network.fuse(features), []
        for token in tokens[:2]:
            output = network.step(token=token, state=state, attend=mix)
            found.append(network.logits(output))
            state = network.recur(output)
        return torch.stack(found)
    assert isinstance(network, PerDepthNetwork)
    feature = features["final"]
    reads = [tokens[: head + 1] if network.reads_tokens else [] for head in range(config.steps)]
    return torch.stack(
        [network.logits(head, network.state(head, feature=feature, tokens=reads[head])) for head in range(config.steps)]
    )
