"""Lookahead decoding: the target guesses for itself with a Jacobi window whose n-grams fill a pool (Fu et al. 2024).

Beside the tree of guesses the target's pass evaluates a window of ``window`` columns. A column is a short continuation
that starts some positions ahead of the text; each pass lengthens every column by the target's best token after it,
until it has ``ngram`` tokens. Finished n-grams go to a pool under their first token; the guesses of a step are the
pool's n-grams that begin with the last committed token. No second model; the price is a longer pass. Knows no model.

Positions: column c of level l stands at root + 1 + c + l and sees the text, level 0 up to column c, and its own
column's levels 1 ... l. So it sees exactly one token at every position before its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outrider.drafters.base import (
    DraftBudget,
    DraftContext,
    Drafter,
    DraftOptions,
    DraftParts,
    GrowingSession,
    Observation,
    Proposal,
)
from outrider.models.base import Segment
from outrider.trees.shapes.base import Candidates, GrowLimits, Shape
from outrider.trees.token_tree import TokenTree
from outrider.trees.topology import ancestors_mask

_MOST_KEYS = 4096
"""First tokens that the pool remembers, least recently used ones go first: bounds its memory."""

NGram = tuple[int, ...]


class LookaheadOptions(DraftOptions):
    """Options of ``Lookahead`` (W, N and G of the paper)."""

    window: Annotated[int, Field(ge=1, le=64, description="columns of the window")] = 5
    ngram: Annotated[int, Field(ge=2, le=16, description="tokens of an n-gram, the first one included")] = 4
    guesses: Annotated[int, Field(ge=1, le=64, description="n-grams kept under a first token")] = 5
    from_prompt: Annotated[bool, Field(description="fill the pool from the prompt too")] = True


class Lookahead(Drafter):
    """N-grams that the target produced ahead of the text, verified in the pass that produces the next ones."""

    Options: ClassVar[type[DraftOptions]] = LookaheadOptions
    positional: ClassVar[str | None] = "window"
    adds_rows = True
    default_shape = "best_first:15"
    summary = "n-grams from a Jacobi window that rides along in the target's pass"
    source = "Lookahead decoding, Fu et al. 2024, arXiv:2402.02057"

    def __init__(self, options: LookaheadOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.settings = options

    def new_session(self) -> LookaheadSession:
        return LookaheadSession(self.shape, self.settings)


class NGramPool:
    """First token -> the n-grams that began with it, most recent last."""

    def __init__(self, per_key: int) -> None:
        self._per_key = per_key
        self._entries: OrderedDict[int, OrderedDict[NGram, None]] = OrderedDict()

    def add(self, first: int, rest: NGram) -> None:
        """Remember that ``rest`` followed ``first``."""
        found = self._entries.setdefault(first, OrderedDict())
        found[rest] = None
        found.move_to_end(rest)
        if len(found) > self._per_key:
            found.popitem(last=False)
        self._entries.move_to_end(first)
        if len(self._entries) > _MOST_KEYS:
            self._entries.popitem(last=False)

    def after(self, first: int) -> list[NGram]:
        """Continuations of ``first``, most recent first."""
        return list(reversed(self._entries.get(first, OrderedDict())))

    def clear(self) -> None:
        self._entries.clear()


class Window:
    """The levels of the Jacobi window; ``levels[l][c]`` is a token at position root + 1 + c + l."""

    def __init__(self, columns: int, most_levels: int) -> None:
        self._columns = columns
        self._most_levels = most_levels
        self.levels: list[list[int]] = []

    def fill(self, text: Sequence[int]) -> None:
        """Start with one level of the text's own last tokens: as good as any guess, and reproducible."""
        self.levels = [[text[-1 - column % len(text)] for column in range(self._columns)]]

    def mask(self) -> NDArray[np.bool_]:
        """bool [rows, rows], rows level by level: what the window's rows see of each other."""
        count, columns = len(self.levels), self._columns
        level, column = np.divmod(np.arange(count * columns), columns)
        first_level = (level[None, :] == 0) & (column[None, :] <= column[:, None])
        own_column = (column[None, :] == column[:, None]) & (level[None, :] <= level[:, None])
        mask: NDArray[np.bool_] = first_level | own_column
        return mask

    def depths(self) -> list[int]:
        """Positions of the rows behind the root's."""
        return [1 + level + column for level in range(len(self.levels)) for column in range(self._columns)]

    def advance(self, emitted: int, predicted: Sequence[int] | None) -> list[tuple[int, NGram]]:
        """Move on by ``emitted`` tokens; returns the finished n-grams (first token, rest).

        Args:
            emitted: tokens committed since the rows were evaluated.
            predicted: the target's best token after each column's last level, [columns]; ``None`` when the window was
                not evaluated.
        """
        finished: list[tuple[int, NGram]] = []
        shift = emitted
        if predicted is not None:
            self.levels.append(list(predicted))
            if len(self.levels) > self._most_levels:
                columns = list(zip(*self.levels, strict=True))
                finished = [(column[0], tuple(column[1:])) for column in columns]
                # A level fewer means that every column begins one position later, which one emitted token asks for.
                del self.levels[0]
                shift = emitted - 1
        for level in self.levels:
            kept = level[shift:] or level[-1:]
            level[:] = [kept[column % len(kept)] for column in range(self._columns)]
        return finished


class LookaheadSession(GrowingSession):
    """One request's pool and window."""

    def __init__(self, shape: Shape, options: LookaheadOptions) -> None:
        super().__init__(shape)
        self._options = options
        self.pool = NGramPool(options.guesses)
        self.window = Window(options.window, options.ngram - 1)
        self._is_evaluated = False  # whether the last proposal carried the window

    def begin(self, context: DraftContext) -> None:
        super().begin(context)
        self.pool.clear()
        if self._options.from_prompt:
            size = self._options.ngram
            for start in range(len(self.tokens) - size + 1):
                self.pool.add(self.tokens[start], tuple(self.tokens[start + 1 : start + size]))
        self.window.fill(self.tokens)
        self._is_evaluated = False

    def propose(self, budget: DraftBudget) -> Proposal:
        tree = super().propose(budget).tree
        depths = self.window.depths()
        root = self.context.target_cache.length
        self._is_evaluated = budget.max_nodes > 0 and root + max(depths) < self.context.target.context_length
        if not self._is_evaluated:
            return Proposal(tree)
        return Proposal(tree, self._segment(tree, root, depths))

    def grow(self, limits: GrowLimits) -> TokenTree:
        return self.shape.grow(self.tokens[-1], _PoolSource(self.pool.after(self.tokens[-1])), limits)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        logits, predicted = observation.extra_logits, None
        if self._is_evaluated and logits is not None and len(logits):
            predicted = logits[:, : self.context.pipeline.vocab_size].argmax(-1).tolist()
        for first, rest in self.window.advance(len(observation.committed), predicted):
            self.pool.add(first, rest)
        self._is_evaluated = False

    def _segment(self, tree: TokenTree, root: int, depths: list[int]) -> Segment:
        """The tree's rows, then the window's, which see the root and each other but no guess."""
        nodes, rows = len(tree), len(depths)
        mask: NDArray[np.bool_] = np.zeros((nodes + rows, nodes + rows), dtype=np.bool_)
        mask[:nodes, :nodes] = ancestors_mask(tree.parent_array())
        mask[nodes:, 0] = True
        mask[nodes:, nodes:] = self.window.mask()
        tokens = [*tree.tokens, *(token for level in self.window.levels for token in level)]
        positions = [root + depth for depth in (*tree.depths, *depths)]
        last_level = range(nodes + rows - self._options.window, nodes + rows)
        return Segment(self.context.target_cache, tokens, positions, mask, [*range(nodes), *last_level])


class _PoolSource:
    """Candidates below the root: the next tokens of the n-grams that spell a node's path."""

    name = "lookahead"

    def __init__(self, ngrams: Sequence[NGram]) -> None:
        self._ngrams = ngrams

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._below(tuple(tree.path_tokens(node))) for node in nodes]

    def _below(self, path: NGram) -> Candidates:
        depth = len(path)
        next_tokens = [n[depth] for n in self._ngrams if len(n) > depth and n[:depth] == path]
        # Ties keep the order of first sight, which is the most recent n-gram's. The share of n-grams that agree is a
        # rough probability; one extra count says that none of them may be right.
        ranked = Counter(next_tokens).most_common()
        total = len(next_tokens) + 1
        return Candidates([token for token, _ in ranked], [count / total for _, count in ranked])
