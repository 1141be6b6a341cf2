"""Small frozen types that all layers share. Imports nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ProposalKind(StrEnum):
    """How the children of a draft-tree node were chosen; decides which verifiers are exact."""

    DETERMINISTIC = "deterministic"  # top-k, n-gram: the proposal is one-hot per child
    IID = "iid"  # k draws with replacement from q
    WITHOUT_REPLACEMENT = "without_replacement"  # ordered draws, q renormalised after each
    PER_SOURCE = "per_source"  # merged trees: every child keeps its source's q


class Topology(StrEnum):
    """Whether a proposal can branch."""

    CHAIN = "chain"
    TREE = "tree"


class Regime(StrEnum):
    """Greedy decoding (temperature 0) or sampling (temperature above 0)."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


class FinishReason(StrEnum):
    """Why a sequence ended. The earliest event wins."""

    STOP_TOKEN = "stop_token"  # an end-of-sequence or stop token id
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the model's context is full
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds one step spent in each phase; ``other`` is the rest of the wall clock."""

    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.target + self.verify + self.other


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did. Statistics, traces and reports are folds over these.

    ``tokens``, ``parents`` and ``sources`` describe the tree (node 0 is the root); ``accepted_path`` lists
    the accepted nodes, root excluded, as the verifier returned them. ``emitted`` are the tokens that the
    sequence kept: accepted ones, then the bonus token, less those trimmed by a stop condition.
    Identity: ``len(emitted) == accepted + bonus - trimmed`` and ``0 <= accepted <= drafted``.
    """

    phase: str  # "prefill" or "decode"
    position: int  # output tokens kept before this step
    drafted: int  # nodes of the tree without its root
    accepted: int  # nodes accepted by the verifier
    emitted: tuple[int, ...]
    bonus: int = 1
    trimmed: int = 0
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    accepted_path: tuple[int, ...] = ()
    times: StepTimes = field(default_factory=StepTimes)


class Role(IntEnum):
    """Who draws; part of the key."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2


class RandomStream(Protocol):
    """The two random decisions that speculative decoding makes."""

    def bernoulli(self, probability: float, position: int, role: Role, draw: int) -> bool:
        """True with ``probability`` (values outside [0, 1] are clipped)."""
        ...

    def categorical(self, probabilities: Tensor, position: int, role: Role, draw: int) -> int:
        """An index with the given probabilities, [vocabulary]; they need not sum to exactly 1."""
        ...
