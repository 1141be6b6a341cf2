"""SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975): guesses are what most often followed the text's last tokens,
in the text itself and, when asked for, in earlier requests' outputs.

Both are suffix trees with counts (``suffix_index.py``). Every context that ends the text, from the longest down,
promises a number of accepted guesses: the sum of the path probabilities of its most frequent continuation, over at most
``factor`` guesses per matched token. The context that promises most is used; on a tie the longer one, and the request's
own text before earlier outputs. A path's probability is the product of count(child) / count(node), where the end of the
text counts as one more occurrence, whose continuation is unknown: what was seen once has probability 1/2. Knows no
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession, Observation
from outrider.drafters.suffix_index import Ends, Point, SuffixTree, expected_length, follow
from outrider.trees.shapes.base import Candidates, GrowLimits, Shape
from outrider.trees.token_tree import TokenTree


class SuffixOptions(DraftOptions):
    """Options of ``Suffix``."""

    max_depth: Annotated[int, Field(ge=2, le=256, description="longest context and guesses together, tokens")] = 64
    min_match: Annotated[int, Field(ge=1, le=32, description="shortest context that gives guesses, tokens")] = 1
    factor: Annotated[float, Field(ge=0.25, le=64.0, description="guesses per matched token at most")] = 2.0
    min_probability: Annotated[
        float, Field(ge=0.0, le=1.0, description="guesses whose path has a lower probability are not made")
    ] = 0.1
    shared: Annotated[bool, Field(description="learn from earlier requests' outputs too")] = False
    capacity: Annotated[
        int, Field(ge=256, le=10_000_000, description="tokens held at most, of the text and of earlier outputs each")
    ] = 32768

    @model_validator(mode="after")
    def _ordered(self) -> SuffixOptions:
        if self.min_match >= self.max_depth:
            raise ValueError(f"min_match {self.min_match} leaves no room for guesses in max_depth {self.max_depth}")
        return self


class Suffix(Drafter):
    """Looks the text's end up in suffix trees of the text and of earlier outputs."""

    Options: ClassVar[type[DraftOptions]] = SuffixOptions
    positional: ClassVar[str | None] = "max_depth"
    default_shape = "chain:16"
    summary = "what most often followed the same tokens in the text, and in earlier outputs when shared=true"
    source = "SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975"

    def __init__(self, options: SuffixOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.settings = options
        self.earlier = SuffixTree(options.max_depth, options.capacity) if options.shared else None

    def new_session(self) -> SuffixSession:
        return SuffixSession(self.shape, self.settings, self.earlier)


class SuffixSession(GrowingSession):
    """One sequence's suffix tree, beside the drafter's tree of earlier outputs (``None`` when that is not shared)."""

    def __init__(self, shape: Shape, options: SuffixOptions, earlier: SuffixTree | None) -> None:
        super().__init__(shape)
        self.own = SuffixTree(options.max_depth, options.capacity)
        self._earlier = earlier
        self._options = options

    def begin(self, context: DraftContext) -> None:
        self.end()
        super().begin(context)
        if self.tokens[: len(self.own.text)] != self.own.text:
            self.own.clear()
        self.own.extend(self.tokens[len(self.own.text) :])

    def grow(self, limits: GrowLimits) -> TokenTree:
        best = self._best_context(min(limits.max_nodes, limits.max_depth, self.shape.size))
        if best is None:
            return TokenTree(self.tokens[-1])
        length, source = best
        depth = min(limits.max_depth, self._reach(length))
        return self.shape.grow(self.tokens[-1], source, replace(limits, max_depth=depth))

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.own.extend(observation.committed)

    def end(self) -> None:
        """Outputs of cancelled requests are entered too: what was kept of them is the target's own text."""
        if self._context is not None and self._earlier is not None and self.output:
            self._earlier.add(self.output)
        super().end()

    def _reach(self, length: int) -> int:
        """Guesses that a context of ``length`` tokens is good for."""
        return max(1, int(self._options.factor * length))

    def _best_context(self, most: int) -> tuple[int, _ContinuationSource] | None:
        """The context (its length and what followed it) with the most accepted guesses to be expected of ``most``."""
        options, best, highest = self._options, None, 0.0
        for contexts in (self._own_contexts(), self._earlier_contexts()):
            judged, occurrences = 0, -1  # length of the last context judged, and its occurrences
            for length, point, ends in contexts:
                reach = min(most, self._reach(length))
                if length < options.min_match or reach <= highest:
                    break  # shorter contexts promise less still
                if point.occurrences == occurrences and judged + reach <= options.max_depth:
                    continue  # the same places as the longer context's, where no more can be read
                judged, occurrences = length, point.occurrences
                promise = expected_length(point, ends, reach, options.min_probability)
                if promise > highest:
                    best = (length, _ContinuationSource(point, ends, options.min_probability))
                    highest = promise
        return best

    def _own_contexts(self) -> Iterator[tuple[int, Point, Ends]]:
        """Ends of the text that occur earlier in it, longest first."""
        ends = self.own.ends()
        for length, point in self.own.matches():
            yield length, point, ends

    def _earlier_contexts(self) -> Iterator[tuple[int, Point, Ends]]:
        """Ends of the text that occur in earlier outputs, longest first; each counts the text's end as if it were one
        of them, as the own tree does."""
        found: list[tuple[int, Point, Ends]] = []
        if self._earlier is None:
            return iter(found)
        for length in range(self._options.min_match, min(self._options.max_depth, len(self.tokens) + 1)):
            point = self._earlier.find(self.tokens[-length:])
            if point is None:
                break  # nor does any longer context occur
            end = point._replace(occurrences=point.occurrences + 1)
            found.append((length, end, {(point.node, point.offset): 1}))
        return reversed(found)


class _ContinuationSource:
    """Candidates for the nodes of one tree: what followed a context, while the path's probability allows."""

    name = "suffix"

    def __init__(self, root: Point, ends: Ends, min_probability: float) -> None:
        self._root = root
        self._ends = ends
        self._least = min_probability
        self._below: dict[int, dict[int, tuple[Point, float]]] = {}

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._candidates(tree, node) for node in nodes]

    def _candidates(self, tree: TokenTree, node: int) -> Candidates:
        point, probability = (self._root, 1.0) if node == 0 else self._below[tree.parents[node]][tree.tokens[node]]
        ranked = self._ranked(point, probability)
        self._below[node] = {token: (child, path) for token, child, path in ranked}
        return Candidates(
            [token for token, _, _ in ranked], [child.occurrences / point.occurrences for _, child, _ in ranked]
        )

    def _ranked(self, point: Point, probability: float) -> list[tuple[int, Point, float]]:
        """(token, point, path probability) of what followed, best first."""
        scale = probability / point.occurrences
        ranked = ((token, child, child.occurrences * scale) for token, child in follow(point, self._ends))
        return [entry for entry in ranked if entry[2] >= self._least and entry[1].occurrences > 0]
