"""``name:option=value,option=value`` -> a registered class and its checked options.

Parts that are made of others name them between plus signs, in brackets where a member has commas or equals signs of its
own; a member's shape follows an at sign: ``ensemble:(ngram:max_match=3@chain:6)+small_model@widths:2,2``.
"""

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
    if rest.strip() and not getattr(options, "model_fields", None):
        raise InvalidOptionError(f"{axis} '{name}' takes no options, got '{rest}'; give '{name}' alone")
    values = _option_values(axis, name, cls, rest)
    if options is None:
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
    for item in filter(None, split_outside_brackets(rest, ",")):
        key, equals, value = item.partition("=")
        if equals and key.strip().isidentifier():
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


def parse_member(text: str) -> tuple[PartSpec, PartSpec | None]:
    """``drafter`` or ``drafter@shape`` of a part that is made of drafters.

    Raises:
        UnknownNameError, InvalidOptionError: as ``parse_part``.
    """
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if not text:
        raise InvalidOptionError("a member has no name; give DRAFTER or DRAFTER@SHAPE, joined by plus signs")
    pieces = split_outside_brackets(text, "@")
    if not 1 <= len(pieces) <= 2 or not all(pieces):
        raise InvalidOptionError(f"'{text}' is not of the form DRAFTER or DRAFTER@SHAPE")
    shape = parse_part("shape", pieces[1]) if len(pieces) == 2 else None
    return parse_part("drafter", pieces[0]), shape


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """``text`` cut at every ``separator`` that is in no bracket, pieces stripped.

    Raises:
        InvalidOptionError: when a bracket has no partner.
    """
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth != 0:
        raise InvalidOptionError(f"'{text}' has a bracket without its partner")
    return [piece.strip() for piece in pieces]
