"""Packed training rows: several answers one after the other in each, told apart by a document number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.heads.config import Feature


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of T tokens, on one device.

    Attributes:
        tokens: int64 [B, T].
        answers: bool [B, T], whether the target wrote the token itself; only such tokens are labels.
        documents: int64 [B, T], which answer of the row a token belongs to; -1 for padding.
        positions: int64 [B, T], index within the document.
        features: target hidden states by name, [B, T, hidden_size]; row t predicted token t + 1.
        best: int64 [B, T], the target's most probable token after row t; -1 where it is not known.
        log_sum: float32 [B, T], log of the sum of exp of the target's logits at row t; 0 where it is not known.
    """

    tokens: Tensor
    answers: Tensor
    documents: Tensor
    positions: Tensor
    features: dict[Feature, Tensor]
    best: Tensor
    log_sum: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        moved = {name: state.to(device) for name, state in self.features.items()}
        others = ("tokens", "answers", "documents", "positions", "best", "log_sum")
        return replace(self, features=moved, **{name: getattr(self, name).to(device) for name in others})
