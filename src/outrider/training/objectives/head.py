"""What the objectives of all heads on hidden states share: the network, its teacher, and the dtype of the products."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BaseModel

from outrider.heads.build import start_network
from outrider.heads.network import DraftNetwork
from outrider.models.base import LanguageModel
from outrider.training.objective import Objective
from outrider.training.teacher import Teacher

N = TypeVar("N", bound=DraftNetwork[Any])
O = TypeVar("O", bound=BaseModel)  # noqa: E741 - options


class HeadObjective(Objective, Generic[N, O]):
    """Common base.

    Args:
        network: its ``draft_ids`` set; bound to the target's rows here if it has no output matrix of its own.
        target: gives frozen embeddings, output rows and what training starts from, nothing else.
        dtype: of these; the target's by default. Under autocast they should be in its dtype.
    """

    Options: ClassVar[type[BaseModel]]

    def __init__(self, network: N, target: LanguageModel, options: O, dtype: torch.dtype | None = None) -> None:
        self.method = network.spec.method
        self.module = self.network = network
        self.options = options
        device = next(network.parameters()).device
        self.teacher = Teacher(target, network.draft_ids, dtype or target.dtype, device)
        self.target = target
        if network.needs_target_rows:
            network.bind(self.teacher.rows, target.final_soft_cap)

    def initialise(self, seed: int) -> None:
        """Set every parameter for the start: the network's own rule, then the norm that the output rows go with."""
        start_network(self.network, self.target, seed)

    def compute_dtype(self) -> torch.dtype:
        """What the products compute in: autocast's dtype, else the parameters'."""
        parameter = next(self.network.parameters())
        kind = parameter.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
