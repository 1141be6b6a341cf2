"""Every head that can be trained, in plain sight: method -> "module:Class" of its objective, imported when used.

An objective's class has ``Options`` (pydantic) and is made of (network, target, options); ``initialise`` gives its
network the numbers that training starts from. Small models and Medusa-2 have trainers of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from outrider.errors import InvalidOptionError, UnknownNameError
from outrider.heads.build import new_config
from outrider.heads.config import HeadConfig
from outrider.heads.network import DraftNetwork
from outrider.heads.registry import network_class
from outrider.models.base import LanguageModel
from outrider.sampling.params import usage_error
from outrider.training.objectives.head import HeadObjective

METHODS = {
    "medusa": "outrider.training.objectives.medusa:MedusaObjective",
    "hydra": "outrider.training.objectives.hydra:HydraObjective",
    "eagle": "outrider.training.objectives.unrolled:EagleObjective",
    "eagle3": "outrider.training.objectives.unrolled:Eagle3Objective",
    "mtp": "outrider.training.objectives.unrolled:MtpObjective",
    "layer_skip": "outrider.training.objectives.exit:ExitObjective",
}

_FIXED = frozenset({"method", "hidden_size", "vocab_size", "draft_vocab_size", "steps", "target", "tokenizer"})
"""Fields of a head's configuration that follow from the target, or have an option of their own."""


def objective_class(method: str) -> type[HeadObjective[Any, Any]]:
    """The objective's class.

    Raises:
        UnknownNameError: listing the known methods.
    """
    if method not in METHODS:
        raise UnknownNameError("training method", method, METHODS)
    module, _, attribute = METHODS[method].partition(":")
    found: type[HeadObjective[Any, Any]] = getattr(importlib.import_module(module), attribute)
    return found


def make_objective(network: DraftNetwork[Any], target: LanguageModel, options: BaseModel) -> HeadObjective[Any, Any]:
    """The objective of the network's method."""
    return objective_class(network.spec.method)(network, target, options)


def split_options(method: str, given: Mapping[str, str], steps: int | None) -> tuple[BaseModel, dict[str, Any]]:
    """The objective's options and the fields of the head's configuration that ``given`` (NAME -> text) asks for.

    Args:
        steps: unrolled steps, or heads; ``None`` for the method's default.

    Raises:
        InvalidOptionError: for an unknown name or a value that is not allowed, listing the names.
    """
    kind = objective_class(method).Options
    fields = [name for name in network_class(method).Config.model_fields if name not in _FIXED]
    known = [*(name for name in kind.model_fields if name != "steps"), *fields]
    for name in given:
        if name not in known:
            raise InvalidOptionError(f"{method} has no option '{name}' for --set; known: {', '.join(known)}")
    own: dict[str, Any] = {name: text for name, text in given.items() if name in kind.model_fields}
    head: dict[str, Any] = {name: _field(name, text) for name, text in given.items() if name not in kind.model_fields}
    if steps is not None:
        head["steps"] = steps
        if "steps" in kind.model_fields:
            own["steps"] = steps
    try:
        options = kind.model_validate(own)
    except ValidationError as error:
        raise InvalidOptionError(f"{method}: {usage_error(error)}") from None
    if "steps" in kind.model_fields:
        head["steps"] = int(getattr(options, "steps"))  # noqa: B009 - only some kinds have it
    return options, head


def head_config(
    method: str, target: LanguageModel, fields: Mapping[str, Any], identity: Mapping[str, str]
) -> HeadConfig:
    """A new head's configuration for ``target``.

    Args:
        identity: ``target`` and ``tokenizer`` of the configuration.

    Raises:
        InvalidOptionError: when a field's value is not allowed.
    """
    try:
        return new_config(method, target, **fields).model_copy(update=dict(identity))
    except ValidationError as error:
        raise InvalidOptionError(f"{method}: {usage_error(error)}") from None


def _field(name: str, text: str) -> Any:
    """``features`` are names or numbers with plus signs between them; other fields are read by their own type."""
    if name != "features":
        return text
    return tuple(int(part) if part.isdigit() else part for part in text.split("+"))
