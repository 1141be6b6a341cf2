"""``name:option=value,option=value`` -> a registered class and its checked options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from outrider.engine.registry import load_class
from outrider.errors import InvalidOptionError
from outrider.sampling.params import usage_error


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part as asked for: its registered name, class and options."""

    axis: str
    name: str
    cls: Any
    options: Any


def parse_part(axis: str, text: str) -> PartSpec:
    """Parse ``text`` for ``axis``; ``name:VALUE`` fills the part's positional option (``chain:8``, ``widths:1,1,3``).

    Raises:
        UnknownNameError: for an unregistered name.
        InvalidOptionError: for an unknown option or a value outside its range.
    """
    name, _, rest = text.partition(":")
    cls = load_class(axis, name.strip())
    options = getattr(cls, "Options", None)
    values = _option_values(axis, name, cls, rest)
    if options is None:
        if values:
            raise InvalidOptionError(f"{axis} '{name}' takes no options, got '{rest}'")
        return PartSpec(axis, name, cls, None)
    try:
        return PartSpec(axis, name, cls, options.model_validate(values))
    except ValidationError as error:
        known = ", ".join(options.model_fields) or "none"
        raise InvalidOptionError(f"{axis} '{name}': {usage_error(error)} (options: {known})") from None


def _option_values(axis: str, name: str, cls: Any, rest: str) -> dict[str, str]:
    positional = getattr(cls, "positional", None)
    values: dict[str, str] = {}
    leading: list[str] = []
    for item in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = item.partition("=")
        if equals:
            values[key.strip()] = value.strip()
        elif values:
            raise InvalidOptionError(f"{axis} '{name}': '{item}' must come before the named options")
        else:
            leading.append(item)
    if leading and positional is None:
        raise InvalidOptionError(f"{axis} '{name}': '{','.join(leading)}' is not of the form option=value")
    if leading and positional is not None:
        values[positional] = ",".join(leading)
    return values
