"""A trained early exit: the target's first blocks, one small residual layer, and the target's own output rows.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) leaves a model after its first blocks and needs a model trained for
it; here the target stays as it is and only this translation from an early hidden state to a final one is learnt, as
Kangaroo's adapter (Liu et al. 2024, arXiv 2404.18911) does with a whole attention layer. Row t reads the input of block
E at row t and predicts token t + 1. Does not know how the state is made: ``drafters/layer_skip.py`` runs the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.heads.config import Feature, HeadConfig, Size
from outrider.heads.network import DraftNetwork, Mlp, RMSNorm, copy_, normal_
from outrider.heads.spec import HeadSpec, Input, TensorSpec


class ExitConfig(HeadConfig):
    """An early exit; its one feature is the block whose input it reads: the number of blocks that run.

    ``steps`` is the length of the chain whose acceptance training simulates; the network has one step.

    Attributes:
        intermediate_size: inner width of the layer.
        norm_eps: of its norms.
    """

    features: tuple[Size]
    intermediate_size: Size
    norm_eps: float = 1e-5

    def symbols(self) -> dict[str, int]:
        return {**super().symbols(), "I": self.intermediate_size}


SPEC = HeadSpec(
    method="layer_skip",
    inputs=(Input("features", "feature", 0),),
    first_label=1,
    is_recurrent=False,
    tensors=(
        TensorSpec("input_layernorm.weight", ("H",)),
        TensorSpec("mlp.gate_proj.weight", ("I", "H")),
        TensorSpec("mlp.up_proj.weight", ("I", "H")),
        TensorSpec("mlp.down_proj.weight", ("H", "I")),
        TensorSpec("norm.weight", ("H",)),
    ),
)


class EarlyExit(DraftNetwork[ExitConfig]):
    """See the module's docstring. Before training it is LayerSkip's plain exit: the layer adds nothing."""

    spec: ClassVar[HeadSpec] = SPEC
    Config: ClassVar[type[HeadConfig]] = ExitConfig

    def __init__(self, config: ExitConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.mlp = Mlp(size, config.intermediate_size)
        self.norm = RMSNorm(size, eps)

    @property
    def block(self) -> int:
        """The block whose input is read; only the blocks before it run."""
        return self.config.features[0]

    def forward(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """Target hidden states [..., H] by name -> logits over the draft vocabulary [..., Vd]."""
        x = features[self.block]
        out: Tensor = self.norm(x + self.mlp(self.input_layernorm(x)))
        return self.target_logits(out)

    def initialise(self, seed: int) -> None:
        """Norms 1, the layer's last product 0, the others normal with standard deviation 0.02."""
        generator = torch.Generator().manual_seed(seed)
        nn.init.ones_(self.input_layernorm.weight)
        nn.init.ones_(self.norm.weight)
        normal_(self.mlp.gate_proj.weight, generator)
        normal_(self.mlp.up_proj.weight, generator)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def adopt_final_norm(self, weight: Tensor) -> None:
        copy_(self.norm.weight, weight)
