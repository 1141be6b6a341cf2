"""THE composition root: a configuration becomes checked parts. The only module that sees every family.

A combination that would not be exact is refused here, before any weights load, with a sentence that names what would
work.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.engine.loading import LoadedModel
from outrider.engine.registry import VERIFIERS, load_class
from outrider.engine.spec import PartSpec, parse_part
from outrider.errors import IllegalCombinationError, InvalidOptionError
from outrider.models.base import LanguageModel
from outrider.schedules.base import Schedule
from outrider.schedules.controller import Controller
from outrider.schedules.synchronous import Synchronous
from outrider.text.vocabulary import explain_difference
from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Verifier

DEFAULT_SHAPE = {"small_model": "chain:5", "layer_skip": "chain:3", "none": "chain:1"}
DEFAULT_VERIFIER = {Regime.GREEDY: "greedy", Regime.SAMPLED: "multi_step"}


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """The named parts of one regime, checked against each other."""

    drafter: PartSpec
    shape: PartSpec
    proposal: ProposalKind
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
    drafter = parse_part("drafter", config.drafter)
    shape = parse_part("shape", config.shape or DEFAULT_SHAPE.get(drafter.name, "chain:8"))
    verifier = parse_part("verifier", config.verifier or DEFAULT_VERIFIER[regime])
    proposal = config.proposal or _default_proposal(drafter, shape, regime)
    if drafter.cls.needs_draft_model and config.draft_model is None:
        raise InvalidOptionError(
            f"drafter '{drafter.name}' needs a second model: give --draft-model NAME|DIR|FILE.gguf"
        )
    if config.draft_model is not None and not drafter.cls.needs_draft_model:
        raise InvalidOptionError(f"drafter '{drafter.name}' takes no --draft-model; use --drafter small_model")
    if proposal is not ProposalKind.DETERMINISTIC and not drafter.cls.samples:
        raise IllegalCombinationError(
            f"drafter '{drafter.name}' has no distribution to draw {proposal.value} children from; "
            "use --proposal deterministic"
        )
    check_exact(verifier, proposal, shape.cls.topology, regime)
    return PartsPlan(drafter, shape, proposal, verifier)


def check_exact(verifier: PartSpec, proposal: ProposalKind, topology: Topology, regime: Regime) -> None:
    """Refuse a verifier whose law is not the target's for this proposal.

    Raises:
        IllegalCombinationError: naming the verifiers that are exact.
    """
    case = (proposal, topology, regime)
    if case in verifier.cls.exact_for and not verifier.cls.lossy:
        return
    legal = [name for name in VERIFIERS if case in load_class("verifier", name).exact_for]
    temperature = "temperature 0" if regime is Regime.GREEDY else "temperature above 0"
    raise IllegalCombinationError(
        f"verifier '{verifier.name}' is not exact for {proposal.value} proposals on a {topology.value} "
        f"at {temperature}; exact there: {', '.join(legal) or 'none'}"
    )


def build_lane(config: EngineConfig, plan: PartsPlan, target: LanguageModel, draft: LanguageModel | None) -> Lane:
    """Construct the parts around loaded models."""
    shape = plan.shape.cls(plan.shape.options, plan.proposal)
    drafter: Drafter = plan.drafter.cls(plan.drafter.options, shape, target, draft)
    controller = Controller(config.max_nodes) if config.adaptive and plan.drafter.name != "none" else None
    schedule = Synchronous(target, drafter, config.max_nodes, controller)
    return Lane(plan, drafter, plan.verifier.cls(), schedule)


def check_draft_vocabulary(target: LoadedModel, draft: LoadedModel) -> None:
    """A draft model must speak the target's tokens (padding rows don't count).

    Raises:
        IllegalCombinationError: saying where the two tokenizers differ.
    """
    difference = explain_difference(target.tokenizer, draft.tokenizer)
    if difference is not None:
        raise IllegalCombinationError(
            f"draft model '{draft.name}' has another tokenizer than '{target.name}': {difference}; "
            "use a draft model of the same family"
        )


def _default_proposal(drafter: PartSpec, shape: PartSpec, regime: Regime) -> ProposalKind:
    if regime is Regime.GREEDY or not drafter.cls.samples:
        return ProposalKind.DETERMINISTIC
    return ProposalKind.IID if shape.cls.topology is Topology.CHAIN else ProposalKind.WITHOUT_REPLACEMENT
