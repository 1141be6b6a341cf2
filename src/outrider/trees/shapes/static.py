"""A tree given path by path, in Medusa's notation (Cai et al. 2024, arXiv:2401.10774).

[0, 1] is the second child of the first child of the root. On the command line a path is its ranks between dots, and
paths stand between slashes: ``static:0/0.0/1/0.1``. Medusa's own lists are taken too, in round brackets or in a JSON
file, and so are the names of ``PRESETS``. Knows no draft source.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AliasChoices, Field, field_validator

from outrider.trees.shapes.base import ChildSource, GrowLimits, Shape, ShapeOptions
from outrider.trees.shapes.structure import RankPath, Structure, grow_structure, path_text
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology

MOST_PATHS = 4096
MOST_RANKS = 1024
PRESETS = {
    # The optimum of 16 guesses for sequoia's generic acceptance vector.
    "small_16": "0/1/2/0.0/0.1/0.2/1.0/2.0/0.0.0/0.0.1/0.1.0/1.0.0/0.0.0.0/1.0.0.0/0.0.0.0.0/0.0.0.0.0.0",
    # EAGLE's fixed tree of 25 guesses (Li et al. 2024, arXiv:2401.15077).
    "eagle_25": "0/1/2/3/0.0/0.1/0.2/1.0/1.1/2.0/2.1/3.0/0.0.0/0.0.1/0.0.2/0.1.0/0.1.1/0.2.0/0.2.1/1.0.0/"
    "0.0.0.0/0.0.0.1/0.0.0.2/0.0.0.0.0/0.0.0.0.1",
}


class StaticOptions(ShapeOptions):
    """Options of ``Static``. ``paths`` (or ``path``) may be text or a list; it becomes 0/0.0/1, presets stay names."""

    paths: Annotated[
        str,
        Field(
            validation_alias=AliasChoices("paths", "path"),
            description="0/0.0/1/0.1, ([0],[0,0],[1],[0,1]), a file FILE.json of such a list, or a preset",
        ),
    ] = "small_16"

    @field_validator("paths", mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        if isinstance(value, str) and value.strip() in PRESETS:
            return value.strip()
        paths = _parse(value) if isinstance(value, str) else _as_paths(value)
        return "/".join(map(path_text, Structure.from_paths(paths).paths()))

    @property
    def structure(self) -> Structure:
        """The tree of the paths."""
        return Structure.from_paths(_parse(PRESETS.get(self.paths, self.paths)))


class Static(Shape):
    """Explicit paths. Within smaller limits, their cheapest part, cut before anything is drawn."""

    Options: ClassVar[type[ShapeOptions]] = StaticOptions
    topology = Topology.TREE
    kinds = frozenset({ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT})
    positional = "paths"
    summary = "a tree given path by path (Medusa's notation)"
    source = "Medusa, Cai et al. 2024, arXiv:2401.10774"

    def __init__(self, options: StaticOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        super().__init__(options, proposal)
        self._structure = options.structure
        self._depth = max(map(len, self._structure.paths()))
        self._cuts: dict[tuple[int, int], Structure] = {}

    @property
    def size(self) -> int:
        return self._structure.size

    @property
    def most_children(self) -> int:
        return self._structure.most_children

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        within = (min(limits.max_nodes, self.size), min(limits.max_depth, self._depth))
        if within not in self._cuts:
            self._cuts[within] = self._structure.cut(*within)
        return grow_structure(self._cuts[within], root_token, self.proposal, source, limits)


_EXPECTED = "give paths of child ranks from the root, for example 0/0.0/1/0.1 or ([0],[0,0],[1],[0,1])"


def _parse(text: str) -> list[RankPath]:
    """Paths from slash notation, from a list as Python or JSON writes it, or from a file of such a list."""
    text = text.strip()
    if text.endswith(".json"):
        return _as_paths(_read_json(Path(text)))
    if text.startswith(("[", "(")):
        return _as_paths(_read_list(text))
    pieces = [piece.split(".") for piece in text.split("/")]
    if not all(rank.isascii() and rank.isdecimal() for piece in pieces for rank in piece):
        raise ValueError(f"{_EXPECTED}; the presets are {', '.join(PRESETS)}")
    return _as_paths([[int(rank) for rank in piece] for piece in pieces])


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the file cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise ValueError(f"the file is not JSON ({error})") from None


def _read_list(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{_EXPECTED}; this list cannot be read") from None


def _as_paths(value: object) -> list[RankPath]:
    """A list of lists of ranks, checked; one path alone may stand for itself."""
    if isinstance(value, list | tuple) and value and all(type(rank) is int for rank in value):
        value = [value]
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_PATHS:
        raise ValueError(f"{_EXPECTED}, 1 to {MOST_PATHS} of them")
    paths: list[RankPath] = []
    for path in value:
        is_path = isinstance(path, list | tuple) and path
        if not is_path or not all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in path):
            raise ValueError(f"{_EXPECTED}, with ranks from 0 to {MOST_RANKS - 1}; {path!r} is not such a path")
        paths.append(tuple(path))
    return paths
