"""The exact part of the audit: every registered verifier, on every kind of proposal that it claims, by enumeration.

The production shapes draw every tree that they can on toy models of three or four tokens, the production verifiers
give every verdict, and the law of the output tokens must be the target's to 1e-12 in total variation
(``audit/law.py``). The lists below say on which parameters and shapes; the tests run the same lists. A new verifier or
shape is covered by its line in the registry. Knows nothing of real models, and lossy rules claim nothing to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from pydantic import ValidationError

from outrider.audit.enumeration import EnumeratingStream
from outrider.audit.law import KEPT, Grow, Source, World, limits, total_variation
from outrider.engine.registry import SHAPES, VERIFIERS, load_class
from outrider.sampling.params import SamplingParams
from outrider.trees.merge import merge
from outrider.trees.shapes.base import Shape
from outrider.trees.shapes.chain import Chain, ChainOptions
from outrider.trees.shapes.widths import Widths, WidthsOptions
from outrider.trees.token_tree import TokenTree
from outrider.types import ProposalKind, Topology

TOLERANCE = 1e-12
"""Total variation up to which a law counts as the target's: rounding of float64 sums stays far below it."""

DETERMINISTIC, IID = ProposalKind.DETERMINISTIC, ProposalKind.IID
WOR, PER_SOURCE = ProposalKind.WITHOUT_REPLACEMENT, ProposalKind.PER_SOURCE


def _params(**values: object) -> SamplingParams:
    return SamplingParams.parse(**{"temperature": 0.8, **values})


_PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {1: 0.4}}
SETTINGS: dict[str, tuple[int, SamplingParams, SamplingParams]] = {
    "temperature": (3, _params(temperature=0.7), _params(temperature=0.7)),
    "draft-hotter": (3, _params(temperature=0.7), _params(temperature=1.6)),
    "target-top-k": (4, _params(top_k=2), _params()),
    "target-top-p": (3, _params(top_p=0.8), _params(top_p=0.9)),
    "draft-support-small": (4, _params(), _params(top_p=0.35)),
    "min-p": (3, _params(min_p=0.4), _params(min_p=0.4)),
    "penalties": (3, _params(**_PENALTIES), _params(**_PENALTIES)),
    "min-tokens": (3, _params(min_tokens=4), _params(min_tokens=4)),
    "greedy": (3, _params(temperature=0.0), _params(temperature=0.0)),
    "greedy-penalties": (3, _params(temperature=0.0, **_PENALTIES), _params(temperature=0.0, **_PENALTIES)),
    "greedy-sampled-draft": (3, _params(temperature=0.0), _params(temperature=1.0)),
}
"""Vocabulary, the target's parameters, the draft's."""

BRIEF_SETTINGS = ("temperature", "draft-hotter", "target-top-k", "target-top-p", "penalties", "greedy")
"""What the audit runs unless it is asked to be thorough."""

CHAINS = (ChainOptions(length=1), ChainOptions(length=2), ChainOptions(length=3), ChainOptions(length=3, stop=0.5))
SMALL_TREES = ((2,), (3,), (2, 1), (1, 2))
LARGE_TREES = ((2, 2), (1, 1, 2), (2, 1, 1), (1, 2, 1))
LARGE_SETTINGS = ("draft-hotter", "target-top-k", "draft-support-small", "penalties")
OTHER_SETTINGS = ("draft-hotter", "greedy")
MERGED_KINDS = ((IID, IID), (WOR, IID), (DETERMINISTIC, WOR), (IID, DETERMINISTIC))


@dataclass(frozen=True, slots=True)
class Case:
    """One verifier on one kind of proposal, topology and setting."""

    verifier: str
    kind: ProposalKind
    topology: Topology
    setting: str

    @property
    def is_claimed(self) -> bool:
        """Whether the verifier says that it is exact here."""
        regime = SETTINGS[self.setting][1].regime
        return (self.kind, self.topology, regime) in load_class("verifier", self.verifier).exact_for

    def __str__(self) -> str:
        return f"{self.verifier}-{self.kind}-{self.topology}-{self.setting}"


@dataclass(frozen=True, slots=True)
class Growth:
    """One way of drawing a tree: its name, the function, and the number of output tokens to compare (depth + 1)."""

    name: str
    grow: Grow
    length: int


@dataclass(frozen=True, slots=True)
class ExactRow:
    """What the enumeration of one case found.

    Attributes:
        distance: total variation between output and target, the largest over the case's shapes; 0 is exact.
        trees: trees enumerated, over all shapes.
        passed: ``distance`` is below ``TOLERANCE``.
        worst: the shape with that distance.
    """

    verifier: str
    kind: ProposalKind
    topology: Topology
    setting: str
    distance: float
    trees: int
    passed: bool
    worst: str


def exact_audit(progress: Callable[[int, int], None] | None = None, thorough: bool = False) -> list[ExactRow]:
    """Enumerate every registered verifier on everything that it claims.

    Args:
        progress: called with (cases done, cases in all) after each case.
        thorough: every setting and shape of the tests; otherwise the settings of ``BRIEF_SETTINGS`` and smaller trees.
    """
    cases = claimed_cases(ProposalKind, Topology, SETTINGS if thorough else BRIEF_SETTINGS)
    rows = []
    for case in cases:
        rows.append(exact_row(case, growths(case, thorough)))
        if progress is not None:
            progress(len(rows), len(cases))
    return rows


def claimed_cases(
    kinds: Iterable[ProposalKind], topologies: Iterable[Topology], settings: Iterable[str] = tuple(SETTINGS)
) -> list[Case]:
    """Every case of these kinds that a registered verifier claims, in the registry's order."""
    every = (Case(*parts) for parts in product(tuple(VERIFIERS), kinds, topologies, settings))
    return [case for case in every if case.is_claimed]


def exact_row(case: Case, shapes: Sequence[Growth]) -> ExactRow:
    """Enumerate one case on the given shapes (at least one)."""
    world = World(*SETTINGS[case.setting])
    verifier = load_class("verifier", case.verifier)()
    trees = 0

    def counted(grow: Grow, where: World, stream: EnumeratingStream) -> TokenTree:
        nonlocal trees
        trees += 1
        return grow(where, stream)

    found = [(total_variation(world, verifier, partial(counted, g.grow), g.length), g.name) for g in shapes]
    # A distance that is no number must not hide behind a smaller one.
    distance, worst = max(found, key=lambda entry: (entry[0] != entry[0], entry[0]))
    passed = distance < TOLERANCE
    return ExactRow(case.verifier, case.kind, case.topology, case.setting, distance, trees, passed, worst)


# -- which trees -------------------------------------------------------------------------------------------------


def growths(case: Case, thorough: bool = True) -> list[Growth]:
    """All shapes for a case: drawn trees, trees cut by a budget, merged trees, and the registry's other shapes."""
    if case.kind is PER_SOURCE:
        return list(merged_growths(case.topology))
    found = list(drawn_growths(case, thorough))
    if case.topology is Topology.TREE:
        found.append(budget_growth(case.kind))
    return found + list(other_growths(case)) if thorough or case.setting in OTHER_SETTINGS else found


def drawn_growths(case: Case, thorough: bool = True) -> Iterator[Growth]:
    """Chains and widths of a case's kind."""
    if case.topology is Topology.CHAIN:
        for options in CHAINS:
            yield _shape_growth(f"chain {options}", Chain(options, case.kind), options.length)
        return
    for widths in _widths(case.setting, thorough):
        yield _shape_growth(f"widths {widths}", Widths(WidthsOptions(widths=widths), case.kind), len(widths))


def _widths(setting: str, thorough: bool) -> tuple[tuple[int, ...], ...]:
    if thorough:
        return (*SMALL_TREES, *LARGE_TREES) if setting in LARGE_SETTINGS else SMALL_TREES
    return (*SMALL_TREES, (2, 1, 1)) if setting == "draft-hotter" else SMALL_TREES


def budget_growth(kind: ProposalKind) -> Growth:
    """A budget that cuts the last level short must not depend on what was drawn."""
    return _shape_growth("widths (2, 2) within 3 nodes", Widths(WidthsOptions(widths=(2, 2)), kind), 2, max_nodes=3)


def other_growths(case: Case, names: Iterable[str] | None = None) -> Iterator[Growth]:
    """The shapes of these names (default: all but chain and widths) that make such proposals, with default options."""
    for name in sorted(set(SHAPES) - {"chain", "widths"}) if names is None else names:
        cls = load_class("shape", name)
        if cls.topology is not case.topology or case.kind not in cls.kinds:
            continue
        try:
            shape = cls(cls.Options(), case.kind)
        except ValidationError:  # an option without a default: the shape's own tests must enumerate it
            continue
        yield _shape_growth(name, shape, 2, max_nodes=4, max_depth=2)


def merged_growths(
    topology: Topology, kinds: Sequence[tuple[ProposalKind, ProposalKind]] = MERGED_KINDS
) -> Iterator[Growth]:
    """Two drafters' trees merged; a merged chain is one drafter's, the other having had nothing to say."""
    for first, second in kinds:
        chain = Chain(ChainOptions(length=2), first)
        if topology is Topology.CHAIN:
            yield Growth(f"{first} chain merged with nothing", partial(_grow_merged, chain, None), 3)
            continue
        other = Chain(ChainOptions(length=2), second)
        for shape in (chain, Widths(WidthsOptions(widths=(2,)), first)):
            name = f"{first} {type(shape).__name__.lower()} merged with {second} chain"
            yield Growth(name, partial(_grow_merged, shape, other), 3)


def _shape_growth(name: str, shape: Shape, depth: int, max_nodes: int = 64, max_depth: int = 8) -> Growth:
    return Growth(name, partial(_grow_shape, shape, max_nodes, max_depth), depth + 1)


def _grow_shape(shape: Shape, max_nodes: int, max_depth: int, where: World, stream: EnumeratingStream) -> TokenTree:
    return shape.grow(KEPT[-1], Source(where, shape.proposal), limits(stream, max_nodes, max_depth))


def _grow_merged(first: Shape, second: Shape | None, where: World, stream: EnumeratingStream) -> TokenTree:
    """Another position keeps the second drafter's draw keys apart, as a stream of its own would."""
    apart = replace(limits(stream), position=len(KEPT) + 100)
    drawn = first.grow(KEPT[-1], Source(where, first.proposal), limits(stream))
    if second is None:
        return merge(drawn, TokenTree(KEPT[-1], PER_SOURCE))
    return merge(drawn, second.grow(KEPT[-1], Source(where, second.proposal, "second"), apart))
