"""The tree of n guesses that is expected to keep the most tokens, from a measured acceptance vector.

Sequoia (Chen et al. 2024, arXiv:2402.12374), section 3.1. Assumption: the b-th child of any node is the accepted one
with probability p_b. A node at the end of ranks b1, b2, ... is then kept with probability p_b1 p_b2 ..., and the tokens
of a step (the bonus token is the root's 1) are expected to be F(T) = sum over the nodes of that product.

With E_l(m) the best F of exactly m nodes, root included, and at most l levels below the root, and T_b(m) the same with
exactly b children at the root:

    T_0(1) = 1,    T_b(m) = max over y of T_{b-1}(m - y) + p_b E_{l-1}(y),    E_l(m) = max over b of T_b(m)

One table serves every smaller budget and depth. It costs O(n^2 depth B) for B ranks, once for each vector; the inner
maximum is one vectorised max-plus convolution. Knows no draft source and no verifier; whoever measures the vector does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field, field_validator

from outrider.trees.shapes.base import ChildSource, GrowLimits, Shape, ShapeOptions
from outrider.trees.shapes.structure import Structure, grow_structure
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology

FloatArray = NDArray[np.float64]
GENERIC = (0.6, 0.15, 0.06, 0.03, 0.02, 0.015, 0.01, 0.01)
"""The vector of ``auto``: a drafter that is right three times in five, its other guesses thinning out fast."""
AUTO = "auto"
MOST_GUESSES = 1024
MOST_RANKS = 64
DEFAULT_DEPTH = 8


class SequoiaOptions(ShapeOptions):
    """Options of ``Sequoia``. A file's vector is read once: ``acceptance`` then holds its numbers."""

    budget: Annotated[int, Field(ge=1, le=MOST_GUESSES, description="guesses in the tree")] = 16
    depth: Annotated[int, Field(ge=1, le=64, description="levels at most")] = DEFAULT_DEPTH
    acceptance: Annotated[
        str, Field(description="share accepted by rank, 0.6/0.2/0.1, or a file of outrider tune acceptance")
    ] = AUTO

    @field_validator("acceptance")
    @classmethod
    def _read(cls, value: str) -> str:
        return AUTO if value == AUTO else "/".join(f"{share:.6g}" for share in read_vector(value))

    @property
    def vector(self) -> tuple[float, ...]:
        """p_1, p_2, ..."""
        return GENERIC if self.acceptance == AUTO else read_vector(self.acceptance)


class Sequoia(Shape):
    """The optimal tree of a budget. Within smaller limits: the optimal one for those, chosen before drawing."""

    Options: ClassVar[type[ShapeOptions]] = SequoiaOptions
    topology = Topology.TREE
    kinds = frozenset({ProposalKind.DETERMINISTIC, ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT})
    positional = "budget"
    summary = "the optimal tree of n guesses for a measured acceptance vector"
    source = "Sequoia, Chen et al. 2024, arXiv:2402.12374"

    def __init__(self, options: SequoiaOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        super().__init__(options, proposal)
        self._budget, self._depth = options.budget, options.depth
        self._trees = optimal_trees(options.vector, options.budget, options.depth)
        self._size = self.structure(options.budget, options.depth).size

    @property
    def size(self) -> int:
        return self._size

    def structure(self, max_nodes: int, max_depth: int) -> Structure:
        """The optimal tree within the limits and the options."""
        return self._trees.structure(min(max_nodes, self._budget), min(max_depth, self._depth))

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        structure = self.structure(limits.max_nodes, limits.max_depth)
        return grow_structure(structure, root_token, self.proposal, source, limits)


class OptimalTrees:
    """The best trees of every size up to ``budget`` guesses and every depth up to ``depth``, for one vector."""

    def __init__(self, vector: Sequence[float], budget: int, depth: int) -> None:
        most = budget + 1  # nodes, the root included
        root_alone = np.full(most + 1, -np.inf)
        root_alone[1] = 1.0
        self._best: list[FloatArray] = [root_alone]  # E_l[m]; index 0 is no tree
        self._widths: list[NDArray[np.intp]] = [np.zeros(most + 1, dtype=np.intp)]  # children of the best root
        self._sizes: list[NDArray[np.int16]] = []  # [rank, m]: nodes below and with the last child, by level from 1
        self._structures: dict[tuple[int, int], Structure] = {}
        for _ in range(depth):
            by_width, sizes = _extend(root_alone, self._best[-1], vector)
            best = by_width.max(axis=0)
            if np.array_equal(best, self._best[-1]):
                break  # depth no longer binds
            self._best.append(best)
            self._widths.append(by_width.argmax(axis=0))
            self._sizes.append(sizes)

    def expected_tokens(self, max_nodes: int, max_depth: int) -> float:
        """F of the best tree of at most ``max_nodes`` guesses and ``max_depth`` levels, the bonus token included."""
        return float(self._best[self._level(max_depth)][1 : max(0, max_nodes) + 2].max())

    def structure(self, max_nodes: int, max_depth: int) -> Structure:
        """The tree of ``expected_tokens``; the smallest one where several are as good."""
        level = self._level(max_depth)
        nodes = 1 + int(self._best[level][1 : max(0, max_nodes) + 2].argmax())
        if (nodes, level) not in self._structures:
            self._structures[nodes, level] = self._build(nodes, level)
        return self._structures[nodes, level]

    def _level(self, depth: int) -> int:
        return max(0, min(depth, len(self._best) - 1))

    def _build(self, nodes: int, level: int) -> Structure:
        pending = [(nodes, level)]  # subtrees in level order: nodes in each, levels that it may use
        ranks, children = [0], []
        for place in range(nodes):
            below = self._split(*pending[place])
            children.append(tuple(range(len(pending), len(pending) + len(below))))
            pending += [(size, pending[place][1] - 1) for size in below]
            ranks += range(len(below))
        return Structure(tuple(ranks), tuple(children))

    def _split(self, nodes: int, level: int) -> list[int]:
        """Nodes in the subtree of each child, first child first."""
        found: list[int] = []
        for rank in range(int(self._widths[level][nodes]) - 1, -1, -1):
            found.append(int(self._sizes[level - 1][rank, nodes]))
            nodes -= found[-1]
        return found[::-1]


def _extend(root_alone: FloatArray, below: FloatArray, vector: Sequence[float]) -> tuple[FloatArray, NDArray[np.int16]]:
    """T_b(m) [B + 1, n + 1] from E_{l-1} ``below``, and the y of each maximum [B, n + 1]."""
    most = len(root_alone) - 1
    rows, sizes = [root_alone], np.zeros((len(vector), most + 1), dtype=np.int16)
    sums = np.empty((most + 1, most))
    for rank, share in enumerate(vector):
        gain = np.full(most, -np.inf)
        reachable = np.isfinite(below[1:])
        gain[reachable] = share * below[1:][reachable]
        # Row m of the windows is T_{b-1}(m - n), ..., T_{b-1}(m - 1): y counts down from n to 1.
        windows = sliding_window_view(np.concatenate([np.full(most, -np.inf), rows[-1]]), most)[: most + 1]
        np.add(windows, gain[::-1], out=sums)
        chosen = sums.argmax(axis=1)
        rows.append(sums[np.arange(most + 1), chosen])
        sizes[rank] = most - chosen
    return np.stack(rows), sizes


@lru_cache(maxsize=16)
def optimal_trees(vector: tuple[float, ...], budget: int, depth: int) -> OptimalTrees:
    """``OptimalTrees``, computed once for each vector, budget and depth."""
    return OptimalTrees(_without_tail(vector), budget, depth)


def expected_tokens(vector: tuple[float, ...], budget: int, depth: int = DEFAULT_DEPTH) -> float:
    """Tokens per step, the bonus token included, that the optimal tree of ``budget`` guesses is expected to give."""
    return optimal_trees(vector, budget, depth).expected_tokens(budget, depth)


def read_vector(text: str) -> tuple[float, ...]:
    """The vector that ``text`` spells (0.6/0.2/0.1), or that the file it names holds: {"vector": [...]}.

    Raises:
        ValueError: neither of both, or numbers that are not shares: each in [0, 1], not all 0, sum at most 1.
    """
    try:
        shares = [float(part) for part in text.split("/")]
    except ValueError:
        shares = _read_file(Path(text))
    if not 1 <= len(shares) <= MOST_RANKS:
        raise ValueError(f"an acceptance vector has 1 to {MOST_RANKS} numbers, not {len(shares)}")
    if not all(0.0 <= share <= 1.0 for share in shares) or not 0.0 < sum(shares) <= 1.0 + 1e-6:
        raise ValueError("the shares of an acceptance vector are between 0 and 1, not all 0, and sum to 1 at most")
    return tuple(shares)


def _read_file(path: Path) -> list[float]:
    make = "make it with 'outrider tune acceptance'"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"it is neither numbers like 0.6/0.2/0.1 nor a readable file ({error.strerror or error}); {make}"
        ) from None
    except ValueError:
        raise ValueError(f"the file is not JSON; {make}") from None
    vector = found.get("vector") if isinstance(found, dict) else found
    if not isinstance(vector, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in vector):
        raise ValueError(f'the file holds no "vector" of numbers; {make}')
    return [float(share) for share in vector]


def _without_tail(vector: tuple[float, ...]) -> tuple[float, ...]:
    """Ranks after the last that is ever accepted are never worth a node."""
    used = [rank for rank, share in enumerate(vector) if share > 0.0]
    return vector[: used[-1] + 1] if used else ()
