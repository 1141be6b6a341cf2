"""Which parts of the audit to run, how large, and the running of them in order.

Knows the parts' names and sizes; each part's own module knows how it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from outrider.audit import report
from outrider.audit.exact import exact_audit
from outrider.audit.faults import fault_audit
from outrider.audit.greedy import greedy_audit
from outrider.audit.replay import replay_audit
from outrider.audit.report import AuditReport, PartReport
from outrider.audit.statistical import statistical_audit
from outrider.audit.stored_step import capture_steps
from outrider.engine.engine import Engine
from outrider.errors import InvalidOptionError, UnknownNameError, UsageError
from outrider.sampling.params import SamplingParams
from outrider.types import Regime

REPLAY_STEPS = 4
CAPTURE_TOKENS = 24

BUILT_IN_PROMPTS = (
    "The cat sat on the mat. The dog sat on the rug. The bird sat on the",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\ndef multiply(a, b):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
)
"""Continued as they are, without a chat template. They repeat themselves, so that every drafter can guess something."""

Progress = Callable[[str, int, int], None]
"""Called with (part, done, in all)."""


class Part(StrEnum):
    """The parts, in the order in which they run."""

    EXACT = "exact"
    FAULTS = "faults"
    GREEDY = "greedy"
    REPLAY = "replay"
    STATISTICS = "statistics"


WITHOUT_MODEL = (Part.EXACT, Part.FAULTS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each part: continuations and their tokens, replays, tokens of a greedy output."""

    samples: int = 2_000
    tokens: int = 8
    replays: int = 200_000
    greedy_tokens: int = 64


QUICK = Sizes(200, 6, 20_000, 24)
NORMAL = Sizes()
THOROUGH = Sizes(5_000, 8, 1_000_000, 128)


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to run.

    Attributes:
        params: sampling parameters of the sampled parts; a temperature of 0 leaves nothing to sample.
        parts: in running order.
        sizes: how much.
        seed: every random decision is a function of it.
        thorough: the exact part enumerates everything that the tests do.
        also: further drafters of the greedy part.
        is_strict: whether a part that the configured engine cannot run is an error instead of being skipped.
    """

    params: SamplingParams
    parts: tuple[Part, ...] = tuple(Part)
    sizes: Sizes = NORMAL
    seed: int = 0
    thorough: bool = False
    also: tuple[str, ...] = ()
    is_strict: bool = False

    @property
    def needs_engine(self) -> bool:
        """Whether a model must be loaded."""
        return bool(set(self.parts) - set(WITHOUT_MODEL))

    def settings(self) -> dict[str, object]:
        """What the figures depend on beside the engine."""
        changed = self.params.model_dump(mode="json", exclude_defaults=True, exclude={"max_tokens", "seed"})
        return {"seed": self.seed, "temperature": self.params.temperature, **changed}


def parse_parts(text: str) -> tuple[Part, ...]:
    """``exact,greedy`` -> parts, in running order.

    Raises:
        UnknownNameError: listing the parts.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in set(Part):
            raise UnknownNameError("audit part", name, list(Part))
    if not names:
        raise InvalidOptionError(f"--parts names no part; give some of {', '.join(Part)}")
    return tuple(part for part in Part if part in names)


def run_audit(
    plan: AuditPlan,
    engine: Engine | None = None,
    prompts: Sequence[Sequence[int]] = (),
    statistics_prompts: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Run the parts of ``plan``.

    Args:
        plan: what to run.
        engine: the parts to audit; may be left out when ``plan.needs_engine`` is false.
        prompts: token ids for the parts that run the model.
        statistics_prompts: those of the statistical part, which is dear; by default ``prompts``.
        progress: called with (part, done, in all).

    Raises:
        UsageError: when a part cannot be run and the plan is strict, or a prompt or drafter does not fit.
    """
    if plan.needs_engine and (engine is None or not prompts):
        raise ValueError("these parts need an engine and a prompt")
    if engine is not None and engine.config.adaptive:
        engine = engine.with_parts(adaptive=False)  # else the clock could turn off what is to be tested
    settings = plan.settings() | ({} if engine is None else dict(engine.describe()))
    parts = []
    for part in plan.parts:
        told = None if progress is None else partial(progress, part.value)
        if engine is None or part in WITHOUT_MODEL:
            parts.append(_without_model(part, plan, told))
        elif part is Part.GREEDY:
            found = greedy_audit(engine, prompts, plan.also, plan.sizes.greedy_tokens, told, plan.params)
            parts.append(report.greedy_report(found, engine.tokenizer.readable))
        elif (reason := _refusal(engine, plan)) is not None:
            parts.append(report.skipped(part.value, reason))
        elif part is Part.REPLAY:
            parts.append(_replay(engine, plan, prompts, told))
        else:
            chosen = prompts if statistics_prompts is None else statistics_prompts
            params = plan.params.model_copy(update={"max_tokens": plan.sizes.tokens})
            rows = statistical_audit(engine, chosen, params, plan.sizes.samples, plan.seed, progress=told)
            parts.append(report.statistics_report(rows))
    return AuditReport(settings, parts)


def _without_model(part: Part, plan: AuditPlan, progress: Callable[[int, int], None] | None) -> PartReport:
    if part is Part.EXACT:
        return report.exact_report(exact_audit(progress, plan.thorough))
    rows = fault_audit()
    if progress is not None:
        progress(len(rows), len(rows))
    return report.fault_report(rows)


def _refusal(engine: Engine, plan: AuditPlan) -> str | None:
    """Why the sampled parts cannot be run, if they cannot."""
    try:
        if plan.params.regime is Regime.GREEDY:
            raise InvalidOptionError("the statistics and replay parts need a temperature above 0")
        vocabulary = engine.pipeline(plan.params, ()).vocab_size
        lane = engine.lane(Regime.SAMPLED)
        lane.verifier.admit(plan.params, vocabulary, lane.drafter.shape.most_children)
    except UsageError as error:
        if plan.is_strict:
            raise
        return str(error)
    return None


def _replay(
    engine: Engine,
    plan: AuditPlan,
    prompts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None,
) -> PartReport:
    params = plan.params.model_copy(update={"max_tokens": CAPTURE_TOKENS})
    steps = capture_steps(engine, prompts, params, REPLAY_STEPS, plan.seed)
    verifier = engine.lane(Regime.SAMPLED).verifier
    return report.replay_report(replay_audit(steps, verifier, plan.sizes.replays, plan.seed, progress))
