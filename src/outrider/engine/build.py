"""THE composition root: a configuration becomes checked parts. The only module that sees every family.

A combination that would not be exact is refused here, before any weights load, with a sentence that names what would
work.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.config import AUTO, FALLBACK_DRAFTER, EngineConfig
from outrider.drafters.base import Drafter, DraftParts
from outrider.drafters.shipped import all_default_drafters
from outrider.engine.loading import LoadedModel
from outrider.engine.registry import VERIFIERS, load_class
from outrider.engine.spec import PartSpec, parse_member, parse_part, split_outside_brackets
from outrider.errors import IllegalCombinationError, InvalidOptionError, UsageError
from outrider.models.base import LanguageModel
from outrider.schedules.base import Schedule
from outrider.schedules.controller import Controller
from outrider.schedules.synchronous import Synchronous
from outrider.text.translate import Translator
from outrider.text.vocabulary import explain_difference, vocabulary_hash
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Verifier

MOST_NODES = 4096

Built = dict[Hashable, Any]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter, its shape, how its children are chosen, and the drafters that it is made of."""

    drafter: PartSpec
    shape: PartSpec
    proposal: ProposalKind
    topology: Topology
    members: tuple[DraftPlan, ...] = ()

    @property
    def draft_models(self) -> int:
        """Second models that it needs, its members' included."""
        return int(self.drafter.cls.needs_draft_model) + sum(member.draft_models for member in self.members)


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """The named parts of one regime, checked against each other."""

    draft: DraftPlan
    verifier: PartSpec


@dataclass(frozen=True, slots=True)
class Lane:
    """The built parts that serve one regime."""

    plan: PartsPlan
    drafter: Drafter
    verifier: Verifier
    schedule: Schedule


def plan_parts(config: EngineConfig, regime: Regime) -> PartsPlan:
    """Choose defaults for ``regime`` and check that the combination is exact.

    Raises:
        UnknownNameError, InvalidOptionError: a part or option that does not exist.
        IllegalCombinationError: parts that are not exact together; the message names verifiers that are.
    """
    drafter = parse_part("drafter", config.known_drafter)
    shape = None if config.shape is None else parse_part("shape", config.shape)
    draft = _plan_draft(drafter, shape, config.proposal, regime)
    verifier = parse_part("verifier", config.verifier or _default_verifier(draft.proposal, regime))
    _check_draft_models(draft, config)
    check_exact(verifier, draft.proposal, draft.topology, regime, config.lossy)
    return PartsPlan(draft, verifier)


def check_exact(
    verifier: PartSpec, proposal: ProposalKind, topology: Topology, regime: Regime, lossy: bool = False
) -> None:
    """Refuse a verifier whose law is not the target's for this proposal, unless it is lossy and that was asked for.

    Raises:
        IllegalCombinationError: naming the verifiers that are exact.
        InvalidOptionError: when ``lossy`` was asked for with a verifier that is exact.
    """
    if lossy and not verifier.cls.lossy:
        names = [name for name in VERIFIERS if load_class("verifier", name).lossy]
        raise InvalidOptionError(f"--lossy only applies to --verifier {' or '.join(names)}; '{verifier.name}' is exact")
    if verifier.cls.lossy and lossy:
        return
    case = (proposal, topology, regime)
    if case in verifier.cls.exact_for and not verifier.cls.lossy:
        return
    legal = [name for name in VERIFIERS if case in load_class("verifier", name).exact_for]
    temperature = "temperature 0" if regime is Regime.GREEDY else "temperature above 0"
    hint = "; --lossy accepts a changed output" if verifier.cls.lossy else ""
    raise IllegalCombinationError(
        f"verifier '{verifier.name}' is not exact for {proposal.value} proposals on a {topology.value} "
        f"at {temperature}; exact there: {', '.join(legal) or 'none'}{hint}"
    )


def build_lane(
    config: EngineConfig, plan: PartsPlan, target: LoadedModel, drafts: Sequence[LoadedModel], built: Built
) -> Lane:
    """Construct the parts around loaded models; ``drafts`` are given out in the order of the members.

    ``built`` is shared by the lanes of an engine (``DraftParts.once``).
    """
    drafter = _build_drafter(plan.draft, target, list(drafts), built)
    budget = min(MOST_NODES, drafter.tree_size) if config.max_nodes is None else config.max_nodes
    controller = Controller(budget) if config.adaptive and plan.draft.drafter.name != "none" else None
    schedule = Synchronous(target.model, drafter, budget, controller)
    options = plan.verifier.options
    verifier: Verifier = plan.verifier.cls() if options is None else plan.verifier.cls(options)
    return Lane(plan, drafter, verifier, schedule)


def build_lanes(
    config: EngineConfig, target: LoadedModel, drafts: Sequence[LoadedModel]
) -> tuple[dict[Regime, Lane], dict[Regime, UsageError]]:
    """The lanes that the parts can serve, and for the other regimes why not."""
    lanes: dict[Regime, Lane] = {}
    refusals: dict[Regime, UsageError] = {}
    built: Built = {}
    for regime in Regime:
        try:
            lanes[regime] = build_lane(config, plan_parts(config, regime), target, drafts, built)
        except UsageError as error:
            refusals[regime] = error
    return lanes, refusals


def refusal_of(config: EngineConfig, regime: Regime) -> UsageError | None:
    """Why the parts cannot serve ``regime``; ``None`` if they can, ``auto`` with some drafter that it may stand for."""
    names = (FALLBACK_DRAFTER, *all_default_drafters()) if config.drafter == AUTO else (config.drafter,)
    refusals = []
    for name in names:
        try:
            plan_parts(config.model_copy(update={"drafter": name}), regime)
        except UsageError as error:
            refusals.append(error)
    return refusals[0] if len(refusals) == len(names) else None


def draft_models_needed(config: EngineConfig) -> int:
    """Second models that the configured drafter and its members need."""
    return _plan_draft(parse_part("drafter", config.known_drafter), None, None, Regime.GREEDY).draft_models


def _plan_draft(drafter: PartSpec, shape: PartSpec | None, proposal: ProposalKind | None, regime: Regime) -> DraftPlan:
    members = _plan_members(drafter, shape, proposal, regime)
    shape = shape or parse_part("shape", drafter.cls.default_shape)
    if drafter.cls.merges:
        return _plan_merged(drafter, shape, members, proposal)
    proposal = proposal or _default_proposal(drafter, shape, regime)
    if proposal is not ProposalKind.DETERMINISTIC and not drafter.cls.samples:
        raise IllegalCombinationError(
            f"drafter '{drafter.name}' has no distribution to draw {proposal.value} children from; "
            "use --proposal deterministic"
        )
    if proposal not in shape.cls.kinds:
        allowed = " or ".join(sorted(kind.value for kind in shape.cls.kinds))
        raise IllegalCombinationError(
            f"shape '{shape.name}' cannot make {proposal.value} proposals; use --proposal {allowed}"
        )
    return DraftPlan(drafter, shape, proposal, shape.cls.topology, members)


def _plan_members(
    drafter: PartSpec, shape: PartSpec | None, proposal: ProposalKind | None, regime: Regime
) -> tuple[DraftPlan, ...]:
    """Plans of the drafters that ``drafter`` is made of; those that it merges take the configured shape."""
    if drafter.cls.members_option is None:
        return ()
    plans = []
    texts = split_outside_brackets(getattr(drafter.options, drafter.cls.members_option), "+")
    parsed = [parse_member(text) for text in texts]
    if drafter.cls.merges and shape is not None and all(own_shape for _, own_shape in parsed):
        raise InvalidOptionError(
            f"--shape {shape.name} would not be used: every member of '{drafter.name}' names its own; leave --shape out"
        )
    for member, own_shape in parsed:
        if member.cls.adds_rows or member.cls.members_option is not None:
            raise IllegalCombinationError(
                f"drafter '{member.name}' cannot be a member of '{drafter.name}'; members bring no rows of their own "
                "and are not made of other drafters: ngram, suffix, datastore, small_model or layer_skip, for example"
            )
        if drafter.cls.merges:
            asked = proposal if proposal is ProposalKind.DETERMINISTIC else None
            plans.append(_plan_draft(member, own_shape or shape, asked, regime))
        else:
            plans.append(_plan_draft(member, own_shape, ProposalKind.DETERMINISTIC, regime))
    return tuple(plans)


def _plan_merged(
    drafter: PartSpec, shape: PartSpec, members: tuple[DraftPlan, ...], proposal: ProposalKind | None
) -> DraftPlan:
    is_fixed = all(member.proposal is ProposalKind.DETERMINISTIC for member in members)
    found = ProposalKind.DETERMINISTIC if is_fixed else ProposalKind.PER_SOURCE
    if proposal not in (None, found):
        raise IllegalCombinationError(
            f"drafter '{drafter.name}' with these members makes {found.value} proposals, not {proposal}; "
            "leave --proposal out"
        )
    return DraftPlan(drafter, shape, found, Topology.TREE, members)


def _check_draft_models(draft: DraftPlan, config: EngineConfig) -> None:
    needed, given = draft.draft_models, len(config.draft_models)
    name = draft.drafter.name
    if given < needed:
        several = f"{needed} second models, separated by commas" if needed > 1 else "a second model"
        raise InvalidOptionError(f"drafter '{name}' needs {several}: give --draft-model NAME|DIR|FILE.gguf")
    if given > needed:
        instead = "use --drafter small_model" if needed == 0 else f"it takes {needed}, {given} were given"
        raise InvalidOptionError(f"drafter '{name}' takes no {'more ' if needed else ''}--draft-model; {instead}")


def _build_drafter(plan: DraftPlan, target: LoadedModel, drafts: list[LoadedModel], built: Built) -> Drafter:
    draft = drafts.pop(0) if plan.drafter.cls.needs_draft_model else None
    members = tuple(_build_drafter(member, target, drafts, built) for member in plan.members)
    translator = None
    if draft is not None and plan.drafter.cls.speaks_target_tokens:
        check_draft_vocabulary(target, draft)
    elif draft is not None:
        translator = Translator(target.tokenizer, draft.tokenizer)
    model: LanguageModel | None = None if draft is None else draft.model
    # A merging drafter grows nothing itself: its shape only says what its members were given.
    proposal = ProposalKind.DETERMINISTIC if plan.drafter.cls.merges else plan.proposal
    shape = plan.shape.cls(plan.shape.options, proposal)
    parts = DraftParts(target.model, model, members, translator, partial(vocabulary_hash, target.tokenizer), built)
    drafter: Drafter = plan.drafter.cls(plan.drafter.options, shape, parts)
    return drafter


def check_draft_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """A draft model must speak the target's tokens (padding rows don't count).

    Raises:
        IllegalCombinationError: saying where the two tokenizers differ.
    """
    difference = explain_difference(target.tokenizer, draft.tokenizer)
    if difference is not None:
        raise IllegalCombinationError(
            f"draft model '{draft.name}' has another tokenizer than '{target.name}': {difference}; "
            "use a draft model of the same family, or --drafter cross_tokenizer"
        )


def _default_verifier(proposal: ProposalKind, regime: Regime) -> str:
    if regime is Regime.GREEDY:
        return "greedy"
    # Equal in law and acceptance for deterministic guesses, and a seed then gives plain sampling's text.
    return "sample_match" if proposal is ProposalKind.DETERMINISTIC else "multi_step"


def _default_proposal(drafter: PartSpec, shape: PartSpec, regime: Regime) -> ProposalKind:
    if regime is Regime.GREEDY or not drafter.cls.samples:
        return ProposalKind.DETERMINISTIC
    drawn = ProposalKind.IID if shape.cls.topology is Topology.CHAIN else ProposalKind.WITHOUT_REPLACEMENT
    return drawn if drawn in shape.cls.kinds else ProposalKind.DETERMINISTIC
