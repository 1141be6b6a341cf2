"""Medusa: independent heads of residual blocks on the target's final hidden state.

Cai et al. 2024 (arXiv 2401.10774). A head is ``blocks`` times x + SiLU(W x + b), then an output product: with the
target's own rows (Medusa's second generation of files, the default here: nothing of the vocabulary's size to store or
to read) or with a matrix of the head's own (the first). Tensors are named as in the original files. Originals repeat
one block where they have several; here each has its own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.heads.config import HeadConfig
from outrider.heads.per_depth import PerDepthConfig, PerDepthNetwork, ResidualBlock
from outrider.heads.spec import HeadSpec, Input, TensorSpec


class MedusaConfig(PerDepthConfig):
    """Medusa adds no field."""


SPEC = HeadSpec(
    method="medusa",
    inputs=(Input("feature", "feature", 0),),
    first_label=2,
    is_recurrent=False,
    tensors=(
        TensorSpec("{steps}.{blocks}.linear.weight", ("H", "H")),
        TensorSpec("{steps}.{blocks}.linear.bias", ("H",)),
        TensorSpec("{steps}.{=blocks}.weight", ("Vd", "H"), when="own_output"),
    ),
)


class Medusa(PerDepthNetwork[MedusaConfig]):
    """See the module's docstring. Children are called 0, 1, ... as in the files."""

    spec: ClassVar[HeadSpec] = SPEC
    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        for head in range(config.steps):
            layers: list[nn.Module] = [ResidualBlock(size, size) for _ in range(config.blocks)]
            if config.own_output:
                layers.append(nn.Linear(size, config.draft_vocab_size, bias=False))
            self.add_module(str(head), nn.Sequential(*layers))

    def state(self, head: int, *, feature: Tensor, tokens: Sequence[Tensor] = ()) -> Tensor:
        x = feature
        for block in list(self._head(head))[: self.config.blocks]:
            x = block(x)
        return x

    def output(self, head: int) -> nn.Module:
        return self._head(head)[self.config.blocks]

    def all_logits(self, feature: Tensor, heads: int) -> Tensor:
        """Logits of the first ``heads`` heads, [heads, n, Vd], of features [n, H]; shared output rows are read once."""
        states = [self.state(head, feature=feature) for head in range(heads)]
        if self.needs_target_rows:
            return self.target_logits(torch.cat(states)).view(heads, len(feature), -1)
        return torch.stack([self.logits(head, state) for head, state in enumerate(states)])

    def _head(self, head: int) -> nn.Sequential:
        found = self.get_submodule(str(head))
        if not isinstance(found, nn.Sequential):
            raise TypeError(f"head {head} is no sequence of layers")
        return found
