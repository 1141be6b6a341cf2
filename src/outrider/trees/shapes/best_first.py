"""Best-first trees: the guesses whose paths the drafter finds most probable, as many as the budget allows.

Score of a node: the sum over its path of log q + log decay. Two ways of finding the best nodes, and so two presets:
SpecExec's parallel search (Svirschevski et al. 2024, arXiv:2406.02532) evaluates the best unevaluated nodes of the
whole tree together, pass after pass; EAGLE-2 (Li et al. 2024, arXiv:2406.16858) evaluates the best nodes of each level,
then ranks all levels' children together. Scores fall along every path, so the best nodes always form a tree, and the
search ends early when no node of the best ``budget`` is unevaluated, but for the last of a full budget: whatever it
could still find would score less.
Deterministic only: choosing drawn children by value would bias the output. Knows nothing of models.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from outrider.trees.shapes.base import (
    BatchSource,
    ChildSource,
    FloatArray,
    GrowLimits,
    RankedChildren,
    Shape,
    ShapeOptions,
    ranked_children,
)
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology

Ints = NDArray[np.int64]

PRESETS: dict[str, dict[str, Any]] = {
    "specexec": {"expand": "tree", "beam": 128, "branch": 32, "depth": 32, "decay": 0.95},
    "eagle2": {"expand": "level", "beam": 10, "branch": 10, "depth": 6, "decay": 1.0},
    "custom": {"expand": "tree", "beam": 4096, "branch": 4096, "depth": 64, "decay": 1.0},
}
"""What a preset puts in place of the options that were not given; ``custom`` limits nothing but the budget."""


class BestFirstOptions(ShapeOptions):
    """Options of ``BestFirst``. Those not given are the preset's; the defaults shown are specexec's."""

    budget: Annotated[int, Field(ge=1, le=4096, description="guesses at most")] = 64
    preset: Annotated[
        Literal["specexec", "eagle2", "custom"],
        Field(description="fills expand, beam, branch, depth and decay where they are not given"),
    ] = "specexec"
    expand: Annotated[
        Literal["tree", "level"],
        Field(description="evaluate the best nodes of the whole tree, or of the newest level only"),
    ] = "tree"
    beam: Annotated[int, Field(ge=1, le=4096, description="nodes evaluated in one draft pass at most")] = 128
    branch: Annotated[int, Field(ge=1, le=4096, description="children considered below a node at most")] = 32
    depth: Annotated[int, Field(ge=1, le=4096, description="draft passes, and so levels, at most")] = 32
    decay: Annotated[float, Field(gt=0.0, le=1.0, description="factor on a path's probability for each level")] = 0.95
    min_path_probability: Annotated[
        float, Field(ge=0.0, le=1.0, description="leave out paths whose probability, decay included, is below this")
    ] = 0.0
    min_expand_probability: Annotated[
        float,
        Field(
            ge=0.0, le=1.0, description="make no draft pass behind paths whose probability, decay included, is below"
        ),
    ] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**PRESETS.get(values.get("preset", "specexec"), {}), **values}


class BestFirst(Shape):
    """The most probable prefixes under the drafter."""

    Options: ClassVar[type[ShapeOptions]] = BestFirstOptions
    topology = Topology.TREE
    kinds = frozenset({ProposalKind.DETERMINISTIC})
    positional = "budget"
    scores = True
    summary = "the paths that the drafter finds most probable, up to a node budget (presets specexec and eagle2)"
    source = "SpecExec, Svirschevski et al. 2024, arXiv:2406.02532; EAGLE-2, Li et al. 2024, arXiv:2406.16858"

    def __init__(self, options: BestFirstOptions, proposal: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        super().__init__(options, proposal)
        self._settings = options

    @property
    def size(self) -> int:
        return self._settings.budget

    def grow(self, root_token: int, source: ChildSource, limits: GrowLimits) -> TokenTree:
        options = self._settings
        pool = _Pool(root_token, min(options.budget, limits.max_nodes), options)
        deepest = min(options.depth, limits.max_depth)
        evaluated = TokenTree(root_token)  # what the source has seen; some of it may not be among the best in the end
        for _ in range(options.depth):
            frontier = pool.frontier(deepest)
            if not len(frontier):
                break
            nodes = pool.enter(frontier, evaluated)
            ranked = ranked_children(source, evaluated, nodes, pool.branch, pool.least(frontier))
            pool.add(frontier, ranked)
        tree, new_index = pool.tree(source.name)
        if isinstance(source, BatchSource):
            source.renumber(new_index)
        return tree


class _Pool:
    """Every node found, in order of discovery (entry 0 is the root), and which of them are the best ``budget``.

    All columns are arrays with one element per entry; ``best`` are entries in descending order of score, the first
    found first among equals, so that a node never stands before its parent.
    """

    def __init__(self, root_token: int, budget: int, options: BestFirstOptions) -> None:
        self.branch = min(options.branch, max(1, budget))  # no node has more children among the best
        self._budget = budget
        self._beam = options.beam
        self._by_level = options.expand == "level"
        self._log_decay = math.log(options.decay)
        least = options.min_path_probability
        self._least = math.log(least) if least > 0.0 else -math.inf
        expand = options.min_expand_probability
        self._least_expanded = math.log(expand) if expand > 0.0 else -math.inf
        self._scores = np.zeros(1)
        self._parents: Ints = np.full(1, -1, dtype=np.int64)
        self._tokens: Ints = np.full(1, root_token, dtype=np.int64)
        self._depths: Ints = np.zeros(1, dtype=np.int64)
        self._nodes: Ints = np.full(1, -1, dtype=np.int64)  # index in the tree of evaluated nodes
        self._best: Ints = np.zeros(1, dtype=np.int64)
        self._newest = 0  # first entry of the newest level

    def frontier(self, deepest: int) -> Ints:
        """The best unevaluated entries among the best, above depth ``deepest``: what the next draft pass is for."""
        # Once the budget is full, the last one's children, which score no more than it does, could only come too late.
        best = self._best if len(self._best) <= self._budget else self._best[:-1]
        is_open = (
            (self._nodes[best] < 0) & (self._depths[best] < deepest) & (self._scores[best] >= self._least_expanded)
        )
        if self._by_level:
            is_open &= best >= self._newest
        return best[is_open][: self._beam]

    def enter(self, frontier: Ints, evaluated: TokenTree) -> list[int]:
        """Add the frontier to the tree that the source sees; returns its nodes there."""
        if frontier[0] == 0:
            nodes = [0]
        else:
            parents = self._nodes[self._parents[frontier]]
            nodes = evaluated.extend(parents.tolist(), self._tokens[frontier].tolist())
        self._nodes[frontier] = nodes
        return nodes

    def least(self, frontier: Ints) -> FloatArray:
        """What a child of each frontier entry must score to be of use, float64 [len(frontier)]."""
        needed = self._least if len(self._best) <= self._budget else max(self._least, self._scores[self._best[-1]])
        # A little less, for the rounding between here and the score that is compared in the end.
        least: FloatArray = np.exp(needed - self._scores[frontier] - self._log_decay - 1e-5)
        return least

    def add(self, frontier: Ints, ranked: RankedChildren) -> None:
        """Take in the children found below ``frontier`` and choose the best again."""
        parents = frontier[ranked.owners]
        # A probability rounded above 1 must not lift a child over its parent.
        scores = self._scores[parents] + np.minimum(np.log(ranked.scores), 0.0) + self._log_decay
        is_likely = scores >= self._least
        parents, tokens, scores = parents[is_likely], ranked.tokens[is_likely], scores[is_likely]
        self._newest = len(self._scores)
        self._scores = np.concatenate([self._scores, scores])
        self._parents = np.concatenate([self._parents, parents])
        self._tokens = np.concatenate([self._tokens, tokens])
        self._depths = np.concatenate([self._depths, self._depths[parents] + 1])
        self._nodes = np.concatenate([self._nodes, np.full(len(parents), -1, dtype=np.int64)])
        pool = np.concatenate([np.sort(self._best), np.arange(self._newest, len(self._scores))])
        order = np.argsort(-self._scores[pool], kind="stable")
        self._best = pool[order[: self._budget + 1]]

    def tree(self, source: str) -> tuple[TokenTree, dict[int, int]]:
        """The best nodes as a tree, and for each of its evaluated nodes: index where it was evaluated -> index here."""
        entries = np.sort(self._best)
        tree = TokenTree(int(self._tokens[0]))
        parents = np.searchsorted(entries, self._parents[entries[1:]])
        tree.extend(parents.tolist(), self._tokens[entries[1:]].tolist(), source)
        tree.scores = np.exp(self._scores[entries]).tolist()
        nodes = self._nodes[entries]
        kept = np.flatnonzero(nodes >= 0)
        return tree, dict(zip(nodes[kept].tolist(), kept.tolist(), strict=True))
