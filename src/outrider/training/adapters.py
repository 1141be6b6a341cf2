"""Low-rank adapters on a trainable Llama (Hu et al. 2021, arXiv 2106.09685), and the weights with them merged in.

A projection W becomes W + (alpha / rank) B A with A [rank, in] drawn and B [out, rank] zero: at the start nothing
changes. Norm weights are trained as they are; they are few, and a model's fingerprint (``models/fingerprint.py``) is
made of them, so that a head for the old model is not taken for one of the new. All else is frozen and, being no part of
``Adapters``, not in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.network import normal_
from outrider.training.small_model import TrainableLlama


class LowRank(nn.Module):
    """What is added to one projection."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank
        normal_(self.down, generator, linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up) * self.scale

    def delta(self) -> Tensor:
        """[out, in], float32."""
        return (self.up @ self.down) * self.scale


class Adapted(nn.Module):
    """A frozen projection with its adapter, in the projection's place. Neither is registered here: see ``Adapters``."""

    def __init__(self, linear: nn.Linear, adapter: LowRank) -> None:
        super().__init__()
        self._parts = (linear, adapter)  # a tuple: a module would list their parameters as its own

    def forward(self, x: Tensor) -> Tensor:
        linear, adapter = self._parts
        out: Tensor = linear(x) + adapter(x)
        return out


class Adapters(nn.Module):
    """All that is trained of a Llama: an adapter for each projection of attention and MLP, and the norms.

    Args:
        llama: changed in place: projections get their adapters, and everything is frozen but the norms.
        rank, alpha: of the adapters.
        seed: of A.
        frozen: dtype to hold frozen matrices in; training in bfloat16 reads half as much with bfloat16 ones.
    """

    def __init__(
        self,
        llama: TrainableLlama,
        rank: int = 32,
        alpha: float = 16.0,
        seed: int = 0,
        frozen: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._llama = (llama,)
        self._frozen = {name: parameter for name, parameter in llama.named_parameters() if not _is_norm(name)}
        for parameter in self._frozen.values():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(frozen)
        self.norms = nn.ParameterDict(
            {_key(name): parameter for name, parameter in llama.named_parameters() if _is_norm(name)}
        )
        self.adapters = nn.ModuleDict()
        for name, parent, child in list(_projections(llama)):
            linear = parent.get_submodule(child)
            assert isinstance(linear, nn.Linear)
            adapter = LowRank(linear, rank, alpha, generator)
            self.adapters[_key(name)] = adapter
            setattr(parent, child, Adapted(linear, adapter))

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new model by transformers' name, float32: nothing of the adapters is left beside it."""
        for name, parameter in self._frozen.items():
            key = _key(name.removesuffix(".weight"))
            tensor = parameter.float()
            if key in self.adapters:
                adapter = self.adapters[key]
                assert isinstance(adapter, LowRank)
                tensor = tensor + adapter.delta()
            yield name, tensor
        for name, parameter in self._llama[0].named_parameters():
            if _is_norm(name):
                yield name, parameter.detach().float()


def _projections(llama: TrainableLlama) -> Iterator[tuple[str, nn.Module, str]]:
    """Name, owner and attribute of each projection of attention and MLP."""
    for name, module in llama.named_modules():
        for child, part in module.named_children():
            if isinstance(part, nn.Linear) and child.endswith("_proj"):
                yield f"{name}.{child}", module, child


def _is_norm(name: str) -> bool:
    return "norm" in name.rsplit(".", 2)[-2]


def _key(name: str) -> str:
    """A module's name may not hold dots."""
    return name.replace(".", "-")
