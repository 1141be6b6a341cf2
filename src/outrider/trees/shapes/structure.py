"""Trees whose form is fixed before anything is drawn: how many children each node gets, and the growing of them.

Shared by ``static`` (explicit paths, Medusa, arXiv:2401.10774) and ``sequoia`` (the optimum of a dynamic program,
arXiv:2402.12374). For a deterministic proposal a structure's child of rank r is the candidate of rank r; draws have no
rank but their order, so for a sampled proposal a node's children are its first draws, one for each child of the
structure. Knows no tokens, no scores and no draft source.

Why sampled proposals stay exact: each draw fills one place, and a node draws as often as the places that it fills have
children. Two equal draws with replacement are one node of the tree; it fills both places, so it gets the children of
both, one after the other. How many that are depends on tokens drawn on earlier levels, never on the values of the draws
themselves, and every draw stays a trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outrider.trees.shapes.base import ChildSource, GrowLimits, add_children, ranked_children
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind

RankPath = tuple[int, ...]
"""Ranks from the root's child down to a node: (0, 2) is the third child of the first child."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree of places in level order; place 0 is the root.

    ``ranks[n]`` is the place's rank among its siblings (0 for the root), ``children[n]`` its children by rank.
    """

    ranks: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]

    @classmethod
    def from_paths(cls, paths: Iterable[RankPath]) -> Structure:
        """The tree whose nodes besides the root are ``paths``, in any order.

        Raises:
            ValueError: naming a path that is empty, listed twice, or whose parent is missing.
        """
        ordered = sorted(paths, key=lambda path: (len(path), path))
        places: dict[RankPath, int] = {(): 0}
        children: list[list[int]] = [[]]
        for path in ordered:
            if path in places:
                raise ValueError(f"path {path_text(path)} is listed twice" if path else "a path is empty")
            parent = places.get(path[:-1])
            if parent is None:
                raise ValueError(f"path {path_text(path)} needs its parent {path_text(path[:-1])}, which is missing")
            children[parent].append(len(children))
            places[path] = len(children)
            children.append([])
        ranks = (0, *(path[-1] for path in ordered))
        return cls(ranks, tuple(tuple(nodes) for nodes in children))

    @property
    def size(self) -> int:
        """Places besides the root."""
        return len(self.children) - 1

    @property
    def most_children(self) -> int:
        """Draws below one node at most: merged draws of a level may take on each other's children."""
        return max(Counter(map(len, self.paths())).values(), default=0)

    def paths(self) -> list[RankPath]:
        """Paths of all places but the root, in level order."""
        found: list[RankPath] = [()] * len(self.children)
        for place, below in enumerate(self.children):
            for child in below:
                found[child] = (*found[place], self.ranks[child])
        return found[1:]

    def cut(self, max_nodes: int, max_depth: int) -> Structure:
        """The tree's best ``max_nodes`` places within ``max_depth``: those of least sum of (rank + 1) along the path.

        A step down and a step to the next rank count alike, so neither depth nor width goes first. A place comes after
        its parent and its earlier siblings, so what is left is connected and keeps every node's first children.
        """
        paths = [path for path in self.paths() if len(path) <= max_depth]
        if len(paths) == self.size <= max_nodes:
            return self
        paths.sort(key=lambda path: (sum(path) + len(path), len(path), path))
        return Structure.from_paths(paths[: max(0, max_nodes)])


def grow_structure(
    structure: Structure, root_token: int, proposal: ProposalKind, source: ChildSource, limits: GrowLimits
) -> TokenTree:
    """A tree of ``structure`` below ``root_token``; one call to ``source`` per level.

    ``structure`` must be within ``limits``: what is drawn is never dropped, so nothing is cut here. Where the source
    knows fewer candidates, or q has fewer tokens, places stay empty together with what is below them.
    """
    tree = TokenTree(root_token, proposal)
    # Node of the tree -> the places wanted below it: the children of every place that the node takes.
    wanted: dict[int, list[int]] = {0: list(structure.children[0])} if structure.size else {}
    while wanted:
        if proposal is ProposalKind.DETERMINISTIC:
            filled = _best_level(tree, structure, wanted, source)
        else:
            filled = _drawn_level(tree, wanted, source, limits)
        wanted = {}
        for place, node in filled:
            if structure.children[place]:
                wanted.setdefault(node, []).extend(structure.children[place])
    return tree


def _best_level(
    tree: TokenTree, structure: Structure, wanted: dict[int, list[int]], source: ChildSource
) -> list[tuple[int, int]]:
    """Propose the candidates of the places' ranks; returns (place, node) for every place that has one."""
    nodes = list(wanted)
    places = np.concatenate([np.asarray(wanted[node], dtype=np.int64) for node in nodes])
    owners = np.repeat(np.arange(len(nodes)), [len(wanted[node]) for node in nodes])
    ranks = np.asarray(structure.ranks, dtype=np.int64)[places]
    known = ranked_children(source, tree, nodes, int(ranks.max()) + 1)
    # Candidates stand owner by owner: those of owner i from starts[i] to starts[i + 1].
    starts = np.searchsorted(known.owners, np.arange(len(nodes) + 1))
    candidate = starts[owners] + ranks
    has_one = candidate < starts[owners + 1]
    tokens = known.tokens[candidate[has_one]].tolist()
    parents = np.asarray(nodes)[owners[has_one]].tolist()
    return list(zip(places[has_one].tolist(), tree.extend(parents, tokens, source.name), strict=True))


def _drawn_level(
    tree: TokenTree, wanted: dict[int, list[int]], source: ChildSource, limits: GrowLimits
) -> list[tuple[int, int]]:
    """Draw one child for every place; returns (place, node) in draw order, equal draws with the same node."""
    filled: list[tuple[int, int]] = []
    for (node, places), known in zip(wanted.items(), source.candidates(tree, list(wanted)), strict=True):
        add_children(tree, node, known, len(places), source.name, limits)
        # Fewer trials than places where q's support ended.
        filled += [(place, trial.child) for place, trial in zip(places, tree.trials(node), strict=False)]
    return filled


def path_text(path: RankPath) -> str:
    """(0, 2) as ``0.2``."""
    return ".".join(map(str, path))
