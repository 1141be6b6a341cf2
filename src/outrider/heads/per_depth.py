"""Heads that have a network of their own for each depth of the tree: Medusa, Hydra.

Head i (from 0) at row t predicts x_{t+2+i} from the target's final hidden state h_t and, where the method reads tokens,
from the embeddings of x_{t+1}, ..., x_{t+1+i}. No head reads another head's state, so there is no cache. Knows no tree,
no embedding matrix and no loss.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.config import HeadConfig, Size
from outrider.heads.network import DraftNetwork, normal_


class PerDepthConfig(HeadConfig):
    """Sizes of the heads.

    Attributes:
        features: the final hidden state, nothing else.
        steps: heads, one a depth.
        blocks: residual blocks of each.
        own_output: whether each head has an output matrix of its own, not the target's rows.
    """

    features: tuple[Literal["final"]] = ("final",)
    steps: Size = 4
    blocks: Size = 1
    own_output: bool = False

    def symbols(self) -> dict[str, int]:
        return {**super().symbols(), "blocks": self.blocks}


P = TypeVar("P", bound=PerDepthConfig)


class PerDepthNetwork(DraftNetwork[P]):
    """One head a depth.

    Attributes:
        reads_tokens: whether ``state`` wants the embeddings of the tokens since row t.
    """

    reads_tokens: ClassVar[bool]

    @property
    def needs_target_rows(self) -> bool:
        return not self.config.own_output

    @abstractmethod
    def state(self, head: int, *, feature: Tensor, tokens: Sequence[Tensor] = ()) -> Tensor:
        """What head ``head`` makes of the final hidden state and the newest ``head + 1`` tokens: [..., H].

        Args:
            feature: h_t, [..., H].
            tokens: E(x_{t+1}), ..., E(x_{t+1+head}), [..., H] each; not looked at unless ``reads_tokens``.
        """

    @abstractmethod
    def output(self, head: int) -> nn.Module:
        """The output matrix of a head that has one (``own_output``)."""

    def logits(self, head: int, state: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., Vd]."""
        if self.needs_target_rows:
            return self.target_logits(state)
        logits: Tensor = self.output(head)(state)
        return logits

    def initialise(self, seed: int) -> None:
        """Blocks as ``ResidualBlock`` says; output matrices normal, until ``copy_target_rows``."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                module.initialise(generator)
        for matrix in self._matrices():
            normal_(matrix.weight, generator)
            if matrix.bias is not None:
                nn.init.zeros_(matrix.bias)

    def copy_target_rows(self, rows: Tensor) -> None:
        """Start every output matrix of its own from ``rows`` [Vd, H] of the target's; nothing where there is none."""
        for matrix in self._matrices():
            with torch.no_grad():
                matrix.weight.copy_(rows)

    def _matrices(self) -> list[nn.Linear]:
        if self.needs_target_rows:
            return []
        found = [self.output(head) for head in range(self.config.steps)]
        return [matrix for matrix in found if isinstance(matrix, nn.Linear)]


class ResidualBlock(nn.Module):
    """``r(x) + SiLU(W x + b)``; r is the identity, or a product where the input is wider than H."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, size)
        if inputs != size:
            self.res_connection = nn.Linear(inputs, size)
        self._is_narrowing = inputs != size

    def forward(self, x: Tensor) -> Tensor:
        residual = self.res_connection(x) if self._is_narrowing else x
        out: Tensor = residual + F.silu(self.linear(x))
        return out

    def initialise(self, generator: torch.Generator) -> None:
        """W 0 and b uniform, as Medusa starts; r keeps the first H inputs (the feature) and ignores the tokens."""
        with torch.no_grad():
            self.linear.weight.zero_()
            bound = 1.0 / math.sqrt(self.linear.in_features)
            bias = torch.rand(self.linear.bias.shape, generator=generator)
            self.linear.bias.copy_((2.0 * bias - 1.0) * bound)
            if self._is_narrowing:
                nn.init.eye_(self.res_connection.weight)
                self.res_connection.bias.zero_()
