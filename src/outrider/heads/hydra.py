"""Hydra: heads that read the guesses before theirs.

Ankner et al. 2024 (arXiv 2402.05109), the ``mlp`` variant. Head i reads the target's final hidden state and the
embeddings of every token since: (i + 2) H inputs. Its first residual block narrows them to H with a product beside the
one inside SiLU; further blocks and the output are Medusa's. Tensors are named as in the original files, whose
``prefix-mlp`` variant (Hydra++: one decoder layer over the text before the heads) is another network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import model_validator
from torch import Tensor, nn

from outrider.heads.config import HeadConfig
from outrider.heads.per_depth import PerDepthConfig, PerDepthNetwork, ResidualBlock
from outrider.heads.spec import HeadSpec, Input, TensorSpec


class HydraConfig(PerDepthConfig):
    """Flags of Hydra.

    Attributes:
        output_bias: whether output matrices of the heads' own have a bias, as the originals' do.
    """

    output_bias: bool = False

    @model_validator(mode="after")
    def _bias_needs_output(self) -> HydraConfig:
        if self.output_bias and not self.own_output:
            raise ValueError("output_bias needs own_output: the target's rows have no bias")
        return self


SPEC = HeadSpec(
    method="hydra",
    inputs=(Input("feature", "feature", 0), Input("tokens", "tokens", 1)),
    first_label=2,
    is_recurrent=False,
    tensors=(
        TensorSpec("hydra_mlp.{steps}.0.linear.weight", ("H", "(steps+2)*H")),
        TensorSpec("hydra_mlp.{steps}.0.linear.bias", ("H",)),
        TensorSpec("hydra_mlp.{steps}.0.res_connection.weight", ("H", "(steps+2)*H")),
        TensorSpec("hydra_mlp.{steps}.0.res_connection.bias", ("H",)),
        TensorSpec("hydra_mlp.{steps}.{blocks:1}.linear.weight", ("H", "H")),
        TensorSpec("hydra_mlp.{steps}.{blocks:1}.linear.bias", ("H",)),
        TensorSpec("hydra_lm_head.{steps}.weight", ("Vd", "H"), when="own_output"),
        TensorSpec("hydra_lm_head.{steps}.bias", ("Vd",), when="output_bias"),
    ),
)


class Hydra(PerDepthNetwork[HydraConfig]):
    """See the module's docstring."""

    spec: ClassVar[HeadSpec] = SPEC
    Config: ClassVar[type[HeadConfig]] = HydraConfig
    reads_tokens: ClassVar[bool] = True

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ResidualBlock((head + 2) * size, size), *(ResidualBlock(size, size) for _ in range(config.blocks - 1))
            )
            for head in range(config.steps)
        )
        if config.own_output:
            self.hydra_lm_head = nn.ModuleList(
                nn.Linear(size, config.draft_vocab_size, bias=config.output_bias) for _ in range(config.steps)
            )

    def state(self, head: int, *, feature: Tensor, tokens: Sequence[Tensor] = ()) -> Tensor:
        if len(tokens) != head + 1:
            raise ValueError(f"head {head} of Hydra reads {head + 1} tokens, not {len(tokens)}")
        state: Tensor = self.hydra_mlp[head](torch.cat([feature, *tokens], dim=-1))
        return state

    def output(self, head: int) -> nn.Module:
        return self.hydra_lm_head[head]
