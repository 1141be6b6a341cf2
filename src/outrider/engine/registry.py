"""Every part that can be named, in plain sight: name -> "module:Class", imported when used."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from outrider.errors import UnknownNameError
from outrider.types import ProposalKind, Regime, Topology

DRAFTERS = {
    "none": "outrider.drafters.none:NoDrafter",
    "ngram": "outrider.drafters.ngram:NGram",
    "suffix": "outrider.drafters.suffix:Suffix",
    "datastore": "outrider.drafters.datastore:Datastore",
    "small_model": "outrider.drafters.small_model:SmallModel",
    "layer_skip": "outrider.drafters.layer_skip:LayerSkip",
    "ensemble": "outrider.drafters.ensemble:Ensemble",
    "hybrid": "outrider.drafters.hybrid:Hybrid",
    "cascade": "outrider.drafters.cascade:Cascade",
    "lookahead": "outrider.drafters.lookahead:Lookahead",
    "cross_tokenizer": "outrider.drafters.cross_tokenizer:CrossTokenizer",
    "eagle": "outrider.drafters.eagle:EagleDrafter",
    "medusa": "outrider.drafters.medusa:MedusaDrafter",
    "hydra": "outrider.drafters.hydra:HydraDrafter",
    "eagle3": "outrider.drafters.eagle3:Eagle3Drafter",
    "mtp": "outrider.drafters.mtp:MtpDrafter",
    "replay": "outrider.drafters.replay:Replay",
}

SHAPES = {
    "chain": "outrider.trees.shapes.chain:Chain",
    "widths": "outrider.trees.shapes.widths:Widths",
    "static": "outrider.trees.shapes.static:Static",
    "sequoia": "outrider.trees.shapes.sequoia:Sequoia",
    "best_first": "outrider.trees.shapes.best_first:BestFirst",
    "pacer": "outrider.trees.shapes.pacer:Pacer",
}

VERIFIERS = {
    "greedy": "outrider.verifiers.greedy:Greedy",
    "multi_step": "outrider.verifiers.multi_step:MultiStep",
    "block": "outrider.verifiers.block:Block",
    "traversal": "outrider.verifiers.traversal:Traversal",
    "swor": "outrider.verifiers.swor:SamplingWithoutReplacement",
    "sample_match": "outrider.verifiers.sample_match:SampleMatch",
    "k_seq": "outrider.verifiers.k_seq:KSequential",
    "optimal_transport": "outrider.verifiers.optimal_transport:OptimalTransport",
    "typical": "outrider.verifiers.typical:Typical",
}

SCHEDULES = {
    "synchronous": "outrider.schedules.synchronous:Synchronous",
}

AXES = {"drafter": DRAFTERS, "shape": SHAPES, "verifier": VERIFIERS, "schedule": SCHEDULES}


def load_class(axis: str, name: str) -> Any:
    """The class registered as ``name`` on ``axis`` (drafter, shape, verifier or schedule).

    Raises:
        UnknownNameError: listing the known names and the closest one.
    """
    table = AXES[axis]
    if name not in table:
        raise UnknownNameError(axis, name, table)
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One registered part, for ``outrider methods``."""

    axis: str
    name: str
    summary: str
    source: str
    exactness: str
    options: str


def methods() -> list[MethodInfo]:
    """Every registered part with its exactness and options."""
    found = []
    for axis, table in AXES.items():
        for name in table:
            cls = load_class(axis, name)
            found.append(MethodInfo(axis, name, cls.summary, cls.source, _exactness(axis, cls), _options(cls)))
    return found


def _exactness(axis: str, cls: Any) -> str:
    if axis != "verifier":
        proposals = ", ".join(sorted(kind.value for kind in cls.kinds)) if axis == "shape" else ""
        return {"drafter": "guesses only", "shape": f"kinds: {proposals}"}.get(axis, "keeps the verifier's law")
    if cls.lossy:
        return "LOSSY"
    parts = []
    for regime in Regime:
        kinds = sorted({kind.value for kind, _, r in cls.exact_for if r is regime})
        if kinds:
            every = "every proposal kind" if len(kinds) == len(ProposalKind) else ", ".join(kinds)
            chains = {t for _, t, r in cls.exact_for if r is regime} == {Topology.CHAIN}
            label = "temperature 0" if regime is Regime.GREEDY else "temperature > 0"
            parts.append(f"exact at {label}: {every}{' (chains)' if chains else ''}")
    return "; ".join(parts)


def _options(cls: Any) -> str:
    options = getattr(cls, "Options", None)
    if options is None:
        return ""
    return ", ".join(f"{name}={field.default}" for name, field in options.model_fields.items())
