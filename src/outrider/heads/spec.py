"""What a head is, declared: named inputs, shifts, and every tensor by name and shape.

Notation: row t of a text x_0, x_1, ... has the target's hidden states h_t, which predicted x_{t+1}. A head's step i
(from 0) stands at row t, reads tokens up to x_{t+1+i} and predicts x_{t+first_label+i}. One alignment
(``training/align.py``), one file check (``heads/file.py``) and every converter (``heads/formats``) read this spec;
nothing else knows a shift or a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

_REPEAT = re.compile(r"\{(\w+)(?::(\d+))?\}")
_SIZE = re.compile(r"\{=(\w+)\}")


@dataclass(frozen=True, slots=True)
class Input:
    """One named input of a head's step.

    Attributes:
        name: how the network's methods call it.
        what: ``feature`` (target hidden states), ``token`` (embedding of one token), ``tokens`` (of all tokens from
            ``shift`` to the newest), or ``state`` (the head's own output of the step before).
        shift: row of a feature or index of a token, relative to t + i.
    """

    name: str
    what: str
    shift: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, or a family of them.

    Attributes:
        name: in the file; ``{steps}`` counts from 0 to that symbol's value, ``{blocks:1}`` from 1, and ``{=blocks}`` is
            the value itself.
        shape: one term a dimension: products and sums of symbols and integers, such as ``2*H`` or ``(steps+2)*H``.
            A ``{name}`` of the family may appear in it as a symbol: its running value.
        when: name of a flag of the configuration without which the tensor does not exist; ``!flag`` negates.
    """

    name: str
    shape: tuple[str, ...]
    when: str | None = None

    def expand(self, symbols: Mapping[str, int], flags: Mapping[str, bool]) -> dict[str, tuple[int, ...]]:
        """Names and shapes under a configuration's sizes and flags."""
        if self.when is not None and flags[self.when.removeprefix("!")] == self.when.startswith("!"):
            return {}
        family = _SIZE.sub(lambda match: str(symbols[match[1]]), self.name)
        counters = {name: int(start or 0) for name, start in _REPEAT.findall(family)}
        found = {}
        for values in product(*(range(start, symbols[counter]) for counter, start in counters.items())):
            running = dict(zip(counters, values, strict=True))
            name = family
            for counter, value in running.items():
                name = re.sub(r"\{" + counter + r"(:\d+)?\}", str(value), name)
            found[name] = tuple(_size(term, {**symbols, **running}) for term in self.shape)
        return found


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A method's declaration.

    Attributes:
        method: registered name.
        inputs: of one step.
        first_label: the first step at row t predicts x_{t + first_label}; step i the i-th after it.
        is_recurrent: whether a step reads the step before (else steps are independent given the features).
        tensors: everything that a file holds, the draft vocabulary's map (``d2t``) aside.
    """

    method: str
    inputs: tuple[Input, ...]
    first_label: int
    is_recurrent: bool
    tensors: tuple[TensorSpec, ...]

    def expected(self, symbols: Mapping[str, int], flags: Mapping[str, bool]) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a head of these sizes and flags has."""
        return {name: shape for t in self.tensors for name, shape in t.expand(symbols, flags).items()}


def _size(term: str, symbols: Mapping[str, int]) -> int:
    """``2*H``, ``(steps+2)*H``: a product of factors, each a symbol, a number, or a sum in brackets."""
    total = 1
    for factor in term.split("*"):
        parts = factor.strip("()").split("+")
        total *= sum(int(part) if part.isdigit() else symbols[part] for part in parts)
    return total
