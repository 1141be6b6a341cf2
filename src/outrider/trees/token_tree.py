"""The token tree and the record of how its children were drawn.

Node 0 is the root: the last committed token, whose key/value entry is not in the target's cache yet. Nodes are
in topological order (a parent precedes its children). Beside the nodes the tree keeps the *trials*: for each node
the ordered list of proposed children, each with the very distribution q that it was drawn from. A token drawn
twice from the same node is one node and two trials (SpecInfer, Miao et al. 2024, section 4.3; dropping the second
trial biases the output). Knows nothing of models, caches or verification rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.types import ProposalKind, Topology

IntArray = NDArray[np.int64]

TRIALS_PER_NODE = 4096
"""Stride of the keys of draws and accept tests: (node, trial index) -> one counter."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One proposal of a child, in the order in which it must be tried.

    ``row`` indexes ``TokenTree.rows``; ``None`` means one-hot (a deterministic proposal). ``excluded`` are the tokens
    drawn before this one without replacement: q is zero there and renormalised.
    """

    child: int
    token: int
    row: int | None = None
    excluded: tuple[int, ...] = ()


class TokenTree:
    """A growing tree of guessed tokens.

    ``tokens[n]``, ``parents[n]`` (-1 for the root), ``depths[n]`` and ``sources[n]`` (the drafter that proposed the
    node) are lists in topological order. Any ``rows`` are float tensors [vocabulary], probabilities. ``scores[n]`` is
    the probability of the path to n by its drafter, the shape's decay included, where the shape tells it
    (``Shape.scores``), else empty.
    """

    def __init__(self, root_token: int, kind: ProposalKind = ProposalKind.DETERMINISTIC) -> None:
        self.kind = kind
        self.tokens: list[int] = [int(root_token)]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.sources: list[str] = [""]
        self.rows: list[Tensor] = []
        self.scores: list[float] = []
        self._trials: dict[int, list[Trial]] = {}
        self._children: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """Number of guessed nodes (the root is not a guess)."""
        return len(self.tokens) - 1

    @property
    def topology(self) -> Topology:
        is_chain = all(parent == node - 1 for node, parent in enumerate(self.parents))
        return Topology.CHAIN if is_chain else Topology.TREE

    # -- growing -------------------------------------------------------------------------------------------

    def add(self, parent: int, token: int, source: str = "", row: int | None = None) -> int:
        """Propose ``token`` below ``parent``; returns the node (an existing one if the token is there already).

        ``row`` names the distribution it was drawn from (see ``add_row``); ``None`` for deterministic proposals,
        where a repeated proposal adds no trial: its mass is already tried.
        """
        excluded: tuple[int, ...] = ()
        if self.kind is ProposalKind.WITHOUT_REPLACEMENT:
            excluded = tuple(t.token for t in self.trials(parent) if t.row == row)
        return self.graft(parent, Trial(-1, int(token), row, excluded), row, source)

    def graft(self, parent: int, trial: Trial, row: int | None, source: str) -> int:
        """``add`` for a trial of another tree: keeps its ``excluded`` tokens, reads its distribution at ``row``."""
        siblings = self._children.setdefault(parent, {})
        child = siblings.get(trial.token)
        is_new = child is None
        if child is None:
            child = len(self.tokens)
            siblings[trial.token] = child
            self.tokens.append(trial.token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.sources.append(source)
        if is_new or row is not None or self.kind is ProposalKind.PER_SOURCE:
            self._trials.setdefault(parent, []).append(Trial(child, trial.token, row, trial.excluded))
        return child

    def extend(self, parents: Sequence[int], tokens: Sequence[int], source: str = "") -> list[int]:
        """``add`` for many deterministic proposals, in order; a parent may be one of them. Returns their nodes.

        Raises:
            ValueError: for a sampled tree, whose proposals need the distribution that they were drawn from.
        """
        if self.kind is not ProposalKind.DETERMINISTIC:
            raise ValueError(f"a {self.kind.value} tree grows by add with a row, not by extend")
        nodes: list[int] = []
        for parent, token in zip(parents, tokens, strict=True):
            siblings = self._children.setdefault(parent, {})
            child = siblings.get(token)
            if child is None:
                child = siblings[token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.depths.append(self.depths[parent] + 1)
                self.sources.append(source)
                self._trials.setdefault(parent, []).append(Trial(child, token))
            nodes.append(child)
        return nodes

    def add_row(self, q: Tensor) -> int:
        """Store a distribution [vocabulary] that children are about to be drawn from; returns its index."""
        self.rows.append(q)
        return len(self.rows) - 1

    # -- reading -------------------------------------------------------------------------------------------

    def children(self, node: int) -> dict[int, int]:
        """Token -> node for the children of ``node``."""
        return self._children.get(node, {})

    def trials(self, node: int) -> Sequence[Trial]:
        """Proposed children of ``node`` in the order in which a verifier must try them."""
        return self._trials.get(node, ())

    def trial_distribution(self, trial: Trial) -> Tensor:
        """The distribution [vocabulary] that ``trial`` was drawn from; only for trials that have a row."""
        if trial.row is None:
            raise ValueError("a deterministic trial has no stored distribution; its proposal is one-hot")
        q = self.rows[trial.row]
        if not trial.excluded:
            return q
        q = q.clone()
        q[torch.tensor(trial.excluded, device=q.device)] = 0.0
        return q / q.sum()

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node`` (empty for the root)."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root's child down to ``node``."""
        return [self.tokens[n] for n in self.path(node)]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Nodes of the longest path below the root that spells a prefix of ``tokens``."""
        nodes: list[int] = []
        node = 0
        for token in tokens:
            child = self.children(node).get(token)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def parent_array(self) -> IntArray:
        return np.asarray(self.parents, dtype=np.int64)

    # -- deriving new trees --------------------------------------------------------------------------------

    def subtree(self, node: int) -> TokenTree:
        """The tree below ``node`` with ``node`` as its root, trials and rows kept (for reuse after a commit)."""
        return self._rebuild(node, keep=None)

    def prune(self, scores: Sequence[float], budget: int) -> TokenTree:
        """The root and the ``budget`` best nodes by score, ancestors always kept.

        Legal for deterministic proposals only: dropping a drawn child by its score biases the output.

        Raises:
            ValueError: for a sampled proposal.
        """
        if self.kind is not ProposalKind.DETERMINISTIC:
            raise ValueError(f"a {self.kind.value} proposal cannot be pruned by score: every drawn child stays a trial")
        order = np.argsort(-np.asarray(scores[1 : len(self)], dtype=np.float64), kind="stable") + 1
        keep: set[int] = set()
        for node in order.tolist():
            if len(keep) >= budget:
                break
            missing = []
            while node > 0 and node not in keep:
                missing.append(node)
                node = self.parents[node]
            if len(keep) + len(missing) <= budget:
                keep.update(missing)
        return self._rebuild(0, keep=keep)

    def _rebuild(self, root: int, keep: set[int] | None) -> TokenTree:
        tree = TokenTree(self.tokens[root], self.kind)
        tree.rows = self.rows
        new_index = {root: 0}
        for node in range(root + 1, len(self)):
            parent = new_index.get(self.parents[node])
            if parent is None or (keep is not None and node not in keep):
                continue
            new_index[node] = len(tree.tokens)
            tree._children.setdefault(parent, {})[self.tokens[node]] = new_index[node]
            tree.tokens.append(self.tokens[node])
            tree.parents.append(parent)
            tree.depths.append(tree.depths[parent] + 1)
            tree.sources.append(self.sources[node])
        for old, new in new_index.items():
            trials = [
                Trial(new_index[t.child], t.token, t.row, t.excluded) for t in self.trials(old) if t.child in new_index
            ]
            if trials:
                tree._trials[new] = trials
        return tree
