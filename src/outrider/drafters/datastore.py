"""Retrieval from the user's own texts (REST, He et al. 2024, arXiv:2311.08252): guesses are what followed the text's
last tokens in a store that ``outrider datastore build`` made of files.

The longest end of the text that the store holds is looked up in its suffix array, and the continuations of all its
occurrences form a trie, in which a token's score is its share of the occurrences that spell the path above it. At the
root the text's end counts as one more occurrence, whose continuation is unknown. REST drafts a fixed token when nothing
is found; here a miss gives no guesses. Knows no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from outrider.drafters.base import Drafter, DraftOptions, DraftParts, GrowingSession
from outrider.drafters.datastore_file import open_store, store_path
from outrider.drafters.datastore_index import SORTED, Positions, TokenStore
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.trees.shapes.base import Candidates, GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

_OFFERED = 64
"""Continuations offered at a node at most: the nodes that REST keeps in all."""


class DatastoreOptions(DraftOptions):
    """Options of ``Datastore``."""

    path: Annotated[str, Field(description="the store: a file, or the directory that it is in")] = ""
    max_match: Annotated[int, Field(ge=1, le=SORTED, description="longest context looked up, tokens")] = 16
    min_match: Annotated[int, Field(ge=1, le=SORTED, description="shortest context that gives guesses, tokens")] = 2
    hits: Annotated[int, Field(ge=1, le=100_000, description="occurrences looked at, at most")] = 1024

    @model_validator(mode="after")
    def _ordered(self) -> DatastoreOptions:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is longer than max_match {self.max_match}")
        return self


class Datastore(Drafter):
    """Looks the text's end up in a store of other texts; the store is read once and shared by all requests.

    Raises:
        InvalidOptionError: no path, or nothing that is a store there.
        ModelFileError: a damaged store.
        IllegalCombinationError: a store that was built for another tokenizer.
    """

    Options: ClassVar[type[DraftOptions]] = DatastoreOptions
    positional: ClassVar[str | None] = "path"
    summary = "retrieval: what followed the same tokens in the user's own texts"
    source = "REST, He et al. 2024, arXiv:2311.08252"

    def __init__(self, options: DatastoreOptions, shape: Shape, parts: DraftParts) -> None:
        super().__init__(options, shape, parts)
        if not options.path:
            raise InvalidOptionError(
                "drafter 'datastore' needs a store: give datastore:FILE (made by: outrider datastore build)"
            )
        path = store_path(options.path)
        self.lookup = options
        self.store = open_store(path)
        _check_vocabulary(str(path), self.store, parts)

    def new_session(self) -> DatastoreSession:
        return DatastoreSession(self.shape, self.lookup, self.store)


class DatastoreSession(GrowingSession):
    """One sequence's text: all the state that a lookup needs."""

    def __init__(self, shape: Shape, options: DatastoreOptions, store: TokenStore) -> None:
        super().__init__(shape)
        self._options = options
        self._store = store

    def grow(self, limits: GrowLimits) -> TokenTree:
        wanted = self._options
        _, found = self._store.matches(self.tokens, wanted.min_match, wanted.max_match, wanted.hits)
        return self.shape.grow(self.tokens[-1], _RetrievedSource(self._store, found), limits)


class _RetrievedSource:
    """Candidates for the nodes of one tree: the continuations that spelled the node's path, by frequency."""

    name = "datastore"

    def __init__(self, store: TokenStore, root: Positions) -> None:
        self._tokens = store.tokens
        self._root = root
        self._next: dict[int, tuple[Positions, Positions]] = {}  # node -> positions of what follows, tokens there

    def candidates(self, tree: TokenTree, nodes: Sequence[int]) -> list[Candidates]:
        return [self._candidates(tree, node) for node in nodes]

    def _candidates(self, tree: TokenTree, node: int) -> Candidates:
        if node == 0:
            positions, occurrences = self._root, len(self._root) + 1
        else:
            above, tokens = self._next[tree.parents[node]]
            positions = above[tokens == tree.tokens[node]] + 1
            occurrences = len(positions)
        positions = positions[self._tokens[positions] >= 0]  # no guess runs into the next document
        following = self._tokens[positions].astype(np.int64)
        self._next[node] = (positions, following)
        tokens, counts = np.unique(following, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:_OFFERED]  # lowest id first among equals
        return Candidates(tokens[order].tolist(), (counts[order] / occurrences).tolist())


def _check_vocabulary(path: str, store: TokenStore, parts: DraftParts) -> None:
    """Token ids mean something in one tokenizer only.

    Raises:
        IllegalCombinationError: naming the model that the store was built for.
    """
    same = parts.vocabulary_hash is None or parts.vocabulary_hash() == store.header.vocabulary
    if not same or int(store.tokens.max()) >= parts.target.vocab_size:
        raise IllegalCombinationError(
            f"the datastore '{path}' holds tokens of '{store.header.model}' ({store.header.vocab_size} of them), which "
            f"mean something else to the target; build it again with --model {parts.target.name}"
        )
