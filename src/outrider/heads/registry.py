"""Every draft network that can be named, in plain sight: method -> "module:Class", imported when used."""

from __future__ import annotations

import importlib
from typing import Any

from outrider.errors import UnknownNameError
from outrider.heads.network import DraftNetwork

NETWORKS = {
    "medusa": "outrider.heads.medusa:Medusa",
    "hydra": "outrider.heads.hydra:Hydra",
    "eagle": "outrider.heads.eagle:Eagle",
    "eagle3": "outrider.heads.eagle3:Eagle3",
    "mtp": "outrider.heads.mtp:Mtp",
    "layer_skip": "outrider.heads.exit:EarlyExit",
}


def network_class(method: str) -> type[DraftNetwork[Any]]:
    """The network of ``method``.

    Raises:
        UnknownNameError: listing the known methods.
    """
    if method not in NETWORKS:
        raise UnknownNameError("head", method, NETWORKS)
    module, _, attribute = NETWORKS[method].partition(":")
    found: type[DraftNetwork[Any]] = getattr(importlib.import_module(module), attribute)
    return found
