"""The contract of a draft source.

A ``Drafter`` is built once and holds what all requests share (a model, an index). ``new_session`` gives the state of
one sequence; ``propose`` grows a tree with the configured shape, ``observe`` tells what was kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from outrider.models.base import LanguageModel, Segment, SequenceCache
from outrider.sampling.draw import RandomStream
from outrider.sampling.transform import LogitsPipeline
from outrider.trees.shapes.base import GrowLimits, Shape
from outrider.trees.token_tree import TokenTree

if TYPE_CHECKING:
    from outrider.text.translate import Translator

Built = TypeVar("Built")


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
        accepted: guesses that the verifier accepted, those cut off by a stop condition included.
        prompt_hidden: after a prefill, the states at the prompt rows before those of ``hidden`` that were evaluated,
            [rows, hidden]: the last ones of the prompt, its final row excluded.
    """

    committed: Sequence[int]
    hidden: dict[str | int, Tensor] = field(default_factory=dict)
    extra_logits: Tensor | None = None
    accepted: int = 0
    prompt_hidden: dict[str | int, Tensor] = field(default_factory=dict)


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

    def reusable(self, prompt: Sequence[int]) -> int:
        """Leading tokens of ``prompt`` whose hidden states this session does not need: the target may keep its entries.

        Asked before ``begin``. All of them, except for sessions that are made of hidden states.
        """
        return len(prompt)

    def end(self) -> None:  # noqa: B027 - most sessions have nothing to undo
        """The request is over (finished, failed or cancelled); roll back anything speculative."""


class GrowingSession(DraftSession):
    """A session that grows one tree a step with a shape: it keeps the text, the request's shape and the last tree.

    Subclasses fill in ``grow``; those that keep more state extend ``begin``, ``observe`` and ``end``.
    """

    def __init__(self, shape: Shape) -> None:
        self._configured_shape = shape
        self.shape = shape
        self.tokens: list[int] = []  # prompt and output
        self.tree: TokenTree | None = None  # the proposal that is not judged yet
        self._context: DraftContext | None = None

    @property
    def context(self) -> DraftContext:
        """The running request's context.

        Raises:
            ValueError: before ``begin`` and after ``end``.
        """
        if self._context is None:
            raise ValueError("the draft session has no request: call begin first")
        return self._context

    @property
    def output(self) -> list[int]:
        """Output tokens so far, the root included."""
        return self.tokens[len(self.context.prompt) :]

    def begin(self, context: DraftContext) -> None:
        self._context = context
        self.tokens = list(context.prompt)
        self.tree = None
        self.shape = self._configured_shape.for_request()

    def propose(self, budget: DraftBudget) -> Proposal:
        if budget.max_nodes < 1 or budget.max_depth < 1:
            self.tree = None
            return Proposal(TokenTree(self.tokens[-1]))
        kept = len(self.tokens) - len(self.context.prompt)
        self.tree = self.grow(GrowLimits(budget.max_nodes, budget.max_depth, kept, self.context.random))
        return Proposal(self.tree)

    @abstractmethod
    def grow(self, limits: GrowLimits) -> TokenTree:
        """A tree below the last committed token, within ``limits``, which allow at least one guess."""

    def observe(self, observation: Observation) -> None:
        if self.tree is not None:
            self.shape.observe(self.tree.drafted, observation.accepted)
        self.tree = None
        self.tokens.extend(observation.committed)

    def end(self) -> None:
        self._context = None
        self.tree = None


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What a drafter may be built around, beside its options and shape.

    Attributes:
        target: the target model.
        draft_model: the second model, for drafters that need one.
        members: drafters that this one combines or uses, each with its own shape.
        translator: between the two models' tokens, for drafters whose model has another tokenizer.
        vocabulary_hash: computes what identifies the target's tokenizer, for drafters that read stored token ids.
        built: what drafters of the same engine built already; use it through ``once``.
    """

    target: LanguageModel
    draft_model: LanguageModel | None = None
    members: tuple[Drafter, ...] = ()
    translator: Translator | None = None
    vocabulary_hash: Callable[[], str] | None = None
    built: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    def once(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """``build()``, or what it returned for the same ``key`` before: an engine's regimes share read-only weights."""
        if key not in self.built:
            self.built[key] = build()
        found: Built = self.built[key]
        return found


class Drafter(ABC):
    """A draft source with its options and shape.

    Class attributes:
        positional: the option that ``name:VALUE`` fills.
        samples: whether children can be drawn from a full distribution q (models can, n-gram tables cannot).
        needs_draft_model: whether a second model must be given.
        speaks_target_tokens: whether that model must have the target's tokenizer.
        members_option: the option that names the drafters that this one is made of (``ensemble:ngram+suffix``).
        merges: whether its proposals are its members' trees, merged or one of them; the configured shape and proposal
            then are theirs.
        adds_rows: whether proposals bring a segment of their own; such a drafter cannot be a member.
        hidden: names of target hidden states that ``observe`` needs.
        default_shape: the shape used when none is asked for.
        summary, source: one line and a citation for ``outrider methods``.
    """

    Options: ClassVar[type[DraftOptions]] = DraftOptions
    positional: ClassVar[str | None] = None
    samples: ClassVar[bool] = False
    needs_draft_model: ClassVar[bool] = False
    speaks_target_tokens: ClassVar[bool] = True
    members_option: ClassVar[str | None] = None
    merges: ClassVar[bool] = False
    adds_rows: ClassVar[bool] = False
    hidden: tuple[str | int, ...] = ()
    default_shape: ClassVar[str] = "chain:8"
    summary: ClassVar[str]
    source: ClassVar[str]

    def __init__(self, options: DraftOptions, shape: Shape, parts: DraftParts) -> None:
        self.options = options
        self.shape = shape
        self.parts = parts

    @property
    def tree_size(self) -> int:
        """Guesses that one proposal holds at most."""
        return self.shape.size

    @abstractmethod
    def new_session(self) -> DraftSession:
        """State for one sequence."""
