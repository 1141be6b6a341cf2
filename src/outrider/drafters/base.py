"""The contract of a draft source.

A ``Drafter`` is built once and holds what all requests share (a model, an index). ``new_session`` gives the state of
one sequence; ``propose`` grows a tree with the configured shape, ``observe`` tells what was kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from outrider.models.base import LanguageModel, Segment, SequenceCache
from outrider.sampling.draw import RandomStream
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from outrider.trees.shapes.base import Shape


class DraftOptions(BaseModel):
    """Base of every part's options: immutable, and a misspelt one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(slots=True)
class DraftContext:
    """What a session may use while it serves one request.

    Attributes:
        prompt: the request's prompt tokens.
        pipeline: turns logits into the distribution that guesses are drawn from (the same function as the target's).
        random: keyed draws; drafters use ``Role.DRAFT``.
        target: the target model, for self-speculation.
        target_cache: the sequence's cache in the target; write to it only inside ``target_cache.speculation()``.
    """

    prompt: Sequence[int]
    pipeline: LogitsPipeline
    random: RandomStream
    target: LanguageModel
    target_cache: SequenceCache


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Limits of one proposal: nodes besides the root, and depth (output tokens and context that remain)."""

    max_nodes: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of guesses.

    Attributes:
        tree: what the verifier walks.
        segment: the rows of the target's pass when they are more than the tree's: its nodes first, then rows that are
            evaluated under the segment's own mask and never verified (Lookahead's window). ``None``: just the tree.
    """

    tree: TokenTree
    segment: Segment | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step committed.

    Attributes:
        committed: the step's kept tokens (accepted guesses, then the bonus token).
        hidden: the target's hidden states at the rows that predicted them, by name, [len(committed), hidden].
        extra_logits: logits of the proposal's rows beyond its tree, [extra rows, vocabulary], or ``None``.
    """

    committed: Sequence[int]
    hidden: dict[str | int, Tensor] = field(default_factory=dict)
    extra_logits: Tensor | None = None


class DraftSession(ABC):
    """One sequence's draft state. Its own caches always equal a fresh prefill of the committed text they cover."""

    @abstractmethod
    def begin(self, context: DraftContext) -> None:
        """Start a request. Called again on the same session, it may reuse caches up to the common prefix."""

    @abstractmethod
    def propose(self, budget: DraftBudget) -> Proposal:
        """Guess what follows the last committed token."""

    @abstractmethod
    def observe(self, observation: Observation) -> None:
        """Learn what was kept after a proposal (or after the prefill, whose first token is the only one)."""

    def end(self) -> None:  # noqa: B027 - most sessions have nothing to undo
        """The request is over (finished, failed or cancelled); roll back anything speculative."""


class Drafter(ABC):
    """A draft source with its options and shape.

    Class attributes:
        positional: the option that ``name:VALUE`` fills.
        samples: whether children can be drawn from a full distribution q (models can, n-gram tables cannot).
        needs_draft_model: whether a second model must be given.
        hidden: names of target hidden states that ``observe`` needs.
        summary, source: one line and a citation for ``outrider methods``.
    """

    Options: ClassVar[type[DraftOptions]] = DraftOptions
    positional: ClassVar[str | None] = None
    samples: ClassVar[bool] = False
    needs_draft_model: ClassVar[bool] = False
    hidden: ClassVar[tuple[str | int, ...]] = ()
    summary: ClassVar[str]
    source: ClassVar[str]

    def __init__(
        self, options: DraftOptions, shape: Shape, target: LanguageModel, draft_model: LanguageModel | None = None
    ) -> None:
        self.options = options
        self.shape = shape
        self.target = target
        self.draft_model = draft_model

    @abstractmethod
    def new_session(self) -> DraftSession:
        """State for one sequence."""
