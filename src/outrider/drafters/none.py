"""No guesses: plain decoding as a special case of speculation (a tree that is only its root)."""

from __future__ import annotations

from outrider.drafters.base import DraftBudget, DraftContext, Drafter, DraftSession, Observation, Proposal
from outrider.trees.token_tree import TokenTree


class NoDrafter(Drafter):
    """Proposes nothing; the target decodes one token per pass."""

    default_shape = "chain:1"
    summary = "no guesses: plain decoding"
    source = "baseline"

    @property
    def tree_size(self) -> int:
        return 0

    def new_session(self) -> _NoSession:
        return _NoSession()


class _NoSession(DraftSession):
    def __init__(self) -> None:
        self._last = 0

    def begin(self, context: DraftContext) -> None:
        self._last = context.prompt[-1] if context.prompt else 0

    def propose(self, budget: DraftBudget) -> Proposal:
        return Proposal(TokenTree(self._last))

    def observe(self, observation: Observation) -> None:
        if observation.committed:
            self._last = observation.committed[-1]
