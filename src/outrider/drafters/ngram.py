"""Prompt lookup: guesses are what followed earlier occurrences of the text's last few tokens (Saxena 2023; Yang et al.
2023, "Inference with Reference").

The text is prompt and output together. An index maps every n-gram, ``min_match`` to ``max_match`` tokens long, to the
places that follow it; it grows with the text at a constant cost per token and never holds more than
``max_match - min_match + 1`` entries per token. Below the root a node keeps the occurrences whose continuation spelled
its path, so different continuations become branches. An occurrence that runs into the end of the text continues with
the guesses themselves, so a loop of period 3 is guessed as far as the shape wants. Knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from outrider.drafters.base import DraftContext, Drafter, DraftOptions, DraftParts, GrowingSession, Observation
from outrider.trees.shapes.base import Candidates, GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

_RECENT = 16
"""Latest occurrences looked at for each match length: bounds the work of a proposal on very repetitive text."""

Occurrence = tuple[int, int]
"""(index in the text of the token that follows, length of the match at the root)."""


class NGramOptions(DraftOptions):
    """Options of ``NGram``."""

    max_match: Annotated[int, Field(ge=1, le=32, description="longest match looked for, tokens")] = 4
    min_match: Annotated[int, Field(ge=1, le=32, description="shortest match that gives guesses, tokens")] = 2
    branches: Annotated[int, Field(ge=1, le=64, description="different continuations offered at a node at most")] = 8

    @model_validator(mode="after")
    def _ordered(self) -> NGramOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is longer than max_match {self.max_match}")
        return self


class NGram(Drafter):
    """Looks the text's last tokens up in the text itself."""

    Options: ClassVar[type[DraftOptions]] = NGramOptions
    positional: ClassVar[str | None] = "max_match"
    summary = "prompt lookup: what followed the same tokens earlier in prompt and output"
    source = "Prompt lookup decoding, Saxena 2023; Yang et al. 2023, arXiv:2304.04487"

    def __init__(self, options: NGramOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        self.lookup = options

    def new_session(self) -> _NGramSession:
        return _NGramSession(self.shape, self.lookup)


class _NGramSession(GrowingSession):
    def __init__(self, shape: Shape, options: NGramOptions) -> None:
        super().__init__(shape)
        self._branches = options.branches
        self._index = NGramIndex(options.min_match, options.max_match)

    def begin(self, context: DraftContext) -> None:
        super().begin(context)
        text = self._index.text
        if self.tokens[: len(text)] != text:
            self._index.clear()
        self._index.extend(self.tokens[len(self._index.text) :])

    def grow(self, limits: GrowLimits) -> TokenTree:
        source = _ContinuationSource(self._index.text, self._index.occurrences(), self._branches)
        return self.shape.grow(self.tokens[-1], source, limits)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self._index.extend(observation.committed)


class NGramIndex:
    """A growing text and, for every n-gram in it that something follows, the indices of what follows."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.text: list[int] = []
        self._lengths = range(max_match, min_match - 1, -1)
        self._follows: dict[tuple[int, ...], list[int]] = {}

    def clear(self) -> None:
        self.text.clear()
        self._follows.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; each is entered as the continuation of the n-grams that end just before it."""
        for token in tokens:
            end = len(self.text)
            for length in self._lengths:
                if length <= end:
                    self._follows.setdefault(tuple(self.text[end - length :]), []).append(end)
            self.text.append(token)

    def occurrences(self) -> list[Occurrence]:
        """Earlier occurrences of the text's end: longest match first, then the most recent; each place once."""
        found: dict[int, int] = {}
        for length in self._lengths:
            if length <= len(self.text):
                for end in reversed(self._follows.get(tuple(self.text[-length:]), ())[-_RECENT:]):
                    found.setdefault(end, length)
        return list(found.items())


class _ContinuationSource:
    """Candidates for the nodes of one tree: the next tokens of the occurrences that spelled the node's path."""

    name = "ngram"

    def __init__(self, text: Sequence[int], occurrences: list[Occurrence], branches: int) -> None:
        self._text = text
        self._root = occurrences
        self._branches = branches
        self._groups: dict[int, dict[int, list[Occurrence]]] = {}

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._below(tree, node) for node in nodes]

    def _below(self, tree: TokenTree, node: int) -> Candidates:
        depth = tree.depths[node]
        here = self._root if node == 0 else self._groups[tree.parents[node]].get(tree.tokens[node], [])
        text, size = self._text, len(self._text)
        path: list[int] | None = None
        groups: dict[int, list[Occurrence]] = {}
        for occurrence in here:
            index = occurrence[0] + depth
            if index < size:
                token = text[index]
            else:
                # The occurrence ran into the end of the text: the guesses above this node continue it.
                path = tree.path_tokens(node) if path is None else path
                token = path[index - size]
            groups.setdefault(token, []).append(occurrence)
        self._groups[node] = groups
        return _rank(groups, self._branches)


def _rank(groups: dict[int, list[Occurrence]], branches: int) -> Candidates:
    """Order by longest match, then count, then recency; score by match length and agreement, as PPM blends contexts.

    A match of n tokens is trusted with probability 1 - 2^-n, which the tokens that follow it share by their counts;
    what is left goes to the next shorter match. So scores are in [0, 1] and sum to less than 1.
    """
    if len(groups) == 1:
        ((token, only),) = groups.items()
        return Candidates((token,), (1.0 - 0.5 ** only[0][1],))
    # Occurrences come longest match first and recent first, so each group's first one is its best, and the stable sort
    # keeps recency among equals.
    ranked = sorted(groups.items(), key=lambda item: (-item[1][0][1], -len(item[1])))
    seen = Counter(length for group in groups.values() for _, length in group)
    left, share = 1.0, {}
    for length in sorted(seen, reverse=True):
        share[length] = left * (1.0 - 0.5**length) / seen[length]
        left *= 0.5**length
    scores = [sum(share[length] for _, length in group) for _, group in ranked[:branches]]
    # Never above a better-ranked token's score, so that "best first" holds for scores too.
    return Candidates([token for token, _ in ranked[:branches]], list(accumulate(scores, min)))
