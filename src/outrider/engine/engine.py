"""The public API: load a model, generate, stream, run batches, look at what every step did.

import outrider
engine = outrider.load("smollm2-135m", drafter="ngram")
for event in engine.stream(engine.encode("Tell me about the sea.")):
    print(event.text, end="", flush=True)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from outrider.config import AUTO, FALLBACK_DRAFTER, EngineConfig
from outrider.drafters.base import DraftContext, Drafter, DraftSession
from outrider.drafters.shipped import default_drafters
from outrider.engine.build import DraftPlan, Lane, build_lanes, draft_models_needed, refusal_of
from outrider.engine.loading import LoadedModel, Progress, load_model
from outrider.engine.result import Event, Result
from outrider.engine.stats import fold
from outrider.engine.text_stream import TextStream
from outrider.errors import ContextLengthError, InvalidOptionError
from outrider.models.base import SequenceCache, common_prefix
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams, usage_error
from outrider.sampling.transform import LogitsPipeline
from outrider.schedules.sequence import RunningSequence
from outrider.schedules.stopping import StopRules
from outrider.text.stop import StopStrings
from outrider.text.tokenizer import Tokenizer
from outrider.types import FinishReason, Regime, StepRecord

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Session:
    """Caches that outlive a request: a chat's next turn prefills only what is new.

    A request takes them out and puts its own back at its end, so two at a time on one session don't disturb each other.
    """

    def __init__(self) -> None:
        self.cache: SequenceCache | None = None
        self.tokens: list[int] = []  # the text that the cache covers
        self.drafts: dict[Drafter, DraftSession] = {}


@dataclass(slots=True, eq=False)
class _Active:
    """A running request and what only the engine needs to know of it."""

    key: object
    sequence: RunningSequence
    text: TextStream
    lane: Lane
    session: Session


class Engine:
    """A loaded target with a drafter, a shape, a verifier and a schedule. Build with ``outrider.load``."""

    def __init__(self, config: EngineConfig, target: LoadedModel, drafts: Sequence[LoadedModel] = ()) -> None:
        self._target = target
        self._drafts = tuple(drafts)
        self.model = target.model
        self.tokenizer: Tokenizer = target.tokenizer
        names = [config.drafter]
        if config.drafter == AUTO:
            names = [*default_drafters(target.model), FALLBACK_DRAFTER]
        self._lanes: dict[Regime, Lane] = {}
        for name in names:
            named = config.model_copy(update={"drafter": name})
            lanes, refusals = build_lanes(named, target, self._drafts)
            # A default that doesn't fit the other options must not stop a run that never asked for it.
            if name == names[0] or len(lanes) > len(self._lanes):
                self.config, self._lanes, self._refusals = named, lanes, refusals
            if not refusals:
                break
        if not self._lanes:
            raise refusals[Regime.GREEDY]

    # -- text in, text out ---------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Prompt tokens: a string goes through the chat template (unless ``raw`` or there is none), messages always do.

        Raises:
            InvalidOptionError: messages for a model without a chat template.
        """
        if isinstance(prompt, str):
            if raw or self.tokenizer.chat_template is None:
                return self.tokenizer.encode(prompt)
            return self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        if prompt and isinstance(prompt[0], Mapping):
            messages = [m for m in prompt if isinstance(m, Mapping)]
            if len(messages) < len(prompt):
                raise InvalidOptionError("a prompt of messages must hold nothing but messages")
            if self.tokenizer.chat_template is None:
                raise InvalidOptionError(f"model '{self.config.model}' has no chat template; give a plain prompt")
            return self.tokenizer.apply_chat_template(messages)
        try:
            return [operator.index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError:
            raise InvalidOptionError("a prompt must be text, a list of token ids or a list of messages") from None

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, session: Session | None = None) -> Result:
        """The whole answer at once."""
        for event in self.stream(prompt, params, session):
            if event.result is not None:
                return event.result
        raise AssertionError("a stream always ends with a result")

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, session: Session | None = None
    ) -> Iterator[Event]:
        """Decode step by step. Closing the iterator early cancels the request and leaves every cache consistent.

        Args:
            prompt: text, messages, or token ids (used as they are).
            params: sampling parameters; greedy, 256 tokens when left out.
            session: caches to continue from and to leave for the next turn.

        Raises:
            UsageError: before anything runs, when the request cannot be honoured.
        """
        active = self._admit(0, prompt, params or SamplingParams(), session or Session())
        return self._events(active)

    def run(
        self, requests: Iterable[tuple[object, Prompt, SamplingParams]], batch: int = 1, reuse: bool = False
    ) -> Iterator[tuple[object, Result]]:
        """Decode many requests, ``batch`` at a time; yields (key, result) as each finishes.

        A finished request's place is taken by the next one at once, with ``reuse`` also its caches (for equal prompts).
        """
        if batch < 1:
            raise InvalidOptionError(f"batch={batch} is not allowed: it must be at least 1")
        waiting = iter(requests)
        running: list[_Active] = []
        idle: list[Session] = []
        try:
            while True:
                while len(running) < batch and (request := next(waiting, None)) is not None:
                    active = self._admit(*request, idle.pop() if idle else Session())
                    running.append(active)
                    if not self._is_finished(active):
                        self._prefill(active)
                if not running:
                    return
                for lane in self._lanes.values():
                    if group := [a for a in running if a.lane is lane and not self._is_finished(a)]:
                        lane.schedule.step([a.sequence for a in group])
                for active in [a for a in running if self._is_finished(a)]:
                    running.remove(active)
                    active.text.push(active.sequence.output, active.sequence.finish)
                    result = self._close(active)
                    idle += [active.session] if reuse else []
                    yield active.key, result
        finally:
            for active in running:
                self._close(active)

    def new_session(self) -> Session:
        """Caches for a conversation; pass it to each turn's ``stream`` or ``generate``."""
        return Session()

    def plain(self) -> Engine:
        """The same loaded target without speculation, for comparison."""
        config = self.config.model_copy(
            update={
                "drafter": "none",
                "shape": None,
                "verifier": None,
                "proposal": None,
                "draft_model": None,
                "max_nodes": None,
                "lossy": False,
            }
        )
        return Engine(config, self._target)

    def with_parts(self, **parts: str | bool | int | None) -> Engine:
        """The same loaded models with other parts.

        Args:
            parts: any of ``drafter``, ``shape``, ``verifier``, ``proposal``, ``adaptive``, ``max_nodes``, ``lossy``.

        Raises:
            UsageError: as ``load``.
        """
        allowed = {"drafter", "shape", "verifier", "proposal", "adaptive", "max_nodes", "lossy"}
        if unknown := set(parts) - allowed:
            raise InvalidOptionError(f"with_parts cannot change {', '.join(sorted(unknown))}; load a new engine")
        try:
            config = EngineConfig.model_validate(self.config.model_dump() | parts)
        except ValidationError as error:
            raise usage_error(error) from None
        # Draft models stay loaded, and are named only to drafters that take them.
        needed = draft_models_needed(config)
        names = ",".join(draft.name for draft in self._drafts[:needed]) or None
        return Engine(config.model_copy(update={"draft_model": names}), self._target, self._drafts)

    def pipeline(self, params: SamplingParams, prompt: Sequence[int]) -> LogitsPipeline:
        """What turns this model's logits into a request's distributions."""
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.eos_ids)
        vocabulary = min(self.model.vocab_size, self.tokenizer.vocab_size)
        return LogitsPipeline(params, vocabulary, stop_ids, prompt)

    def lane(self, regime: Regime) -> Lane:
        """The built parts that serve ``regime``.

        Raises:
            UsageError: when the configured parts are not exact for it.
        """
        if regime in self._refusals:
            raise self._refusals[regime]
        return self._lanes[regime]

    def describe(self) -> dict[str, str]:
        """What runs, for people."""
        lane = next(iter(self._lanes.values()))
        verifiers = {
            regime.value: lane.plan.verifier.name + (" LOSSY" if lane.verifier.lossy else "")
            for regime, lane in self._lanes.items()
        }
        return {
            "model": self._target.name,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "weights": self._target.weights,
            "device": str(self.model.device),
            "threads": str(torch.get_num_threads()),
            "drafter": self.config.drafter + (f" ({self.config.draft_model})" if self.config.draft_model else ""),
            "shape": self.config.shape or _shape_text(lane.plan.draft),
            "verifier": ", ".join(f"{name} ({regime})" for regime, name in verifiers.items()),
        }

    # -- one request ---------------------------------------------------------------------------------------

    def _admit(self, key: object, prompt: Prompt, params: SamplingParams, session: Session) -> _Active:
        tokens = self.encode(prompt)
        lane = self.lane(params.regime)
        self._check_tokens(tokens, params)
        room = self.model.context_length - len(tokens)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens but the context of '{self._target.name}' holds "
                f"{self.model.context_length}; shorten it to {self.model.context_length - 1} at most"
            )
        pipeline = self.pipeline(params, tokens)
        stops = StopStrings(self.tokenizer, params.stop) if params.stop else None
        limit = FinishReason.LENGTH if params.max_tokens <= room else FinishReason.CONTEXT
        rules = StopRules(frozenset(pipeline.stop_ids), params.min_tokens, min(params.max_tokens, room), limit, stops)
        lane.verifier.admit(params, pipeline.vocab_size, lane.drafter.shape.most_children)
        draft_session = session.drafts.pop(lane.drafter, None) or lane.drafter.new_session()
        cache = self._reusable_cache(session, tokens, draft_session.reusable(tokens))
        random = SeededStream(params.seed)
        # Where a seed's draws depend on the tree, the clock must not choose it.
        is_adaptive = params.regime is Regime.GREEDY or params.seed is None or lane.verifier.seed_fixes_text
        sequence = RunningSequence(tokens, pipeline, random, rules, lane.verifier, cache, draft_session, is_adaptive)
        if params.max_tokens == 0:
            sequence.finish = FinishReason.LENGTH
        draft_session.begin(DraftContext(tokens, pipeline, random, self.model, cache))
        return _Active(key, sequence, TextStream(self.tokenizer, stops), lane, session)

    def _events(self, active: _Active) -> Iterator[Event]:
        sequence = active.sequence
        is_closed = False
        try:
            while True:
                record: StepRecord | None = None
                if not self._is_finished(active):
                    record = self._advance(active)
                is_last = self._is_finished(active)
                tokens = () if record is None else record.emitted
                text = active.text.push(tokens, sequence.finish)
                if is_last:
                    is_closed = True
                    yield Event(text, tokens, record, self._close(active))
                    return
                yield Event(text, tokens, record)
        finally:
            if not is_closed:
                sequence.finish = FinishReason.CANCELLED
                self._close(active)

    def _advance(self, active: _Active) -> StepRecord:
        if not active.sequence.records:
            return self._prefill(active)
        return active.lane.schedule.step([active.sequence])[0]

    def _prefill(self, active: _Active) -> StepRecord:
        return active.lane.schedule.prefill(active.sequence)

    def _close(self, active: _Active) -> Result:
        """Leave every cache at the committed text and make the result."""
        sequence, session = active.sequence, active.session
        sequence.session.end()
        sequence.cache.rollback()
        session.cache = sequence.cache
        session.drafts[active.lane.drafter] = sequence.session
        session.tokens = [*sequence.prompt, *sequence.output][: sequence.cache.length]
        return Result(
            prompt_tokens=len(sequence.prompt),
            tokens=tuple(sequence.output),
            text=active.text.text,
            finish_reason=sequence.finish or FinishReason.CANCELLED,
            records=tuple(sequence.records),
            stats=fold(sequence.records, len(sequence.prompt), sequence.verifier.lossy),
            logprobs=tuple(sequence.logprobs) if sequence.pipeline.params.logprobs is not None else None,
        )

    @staticmethod
    def _is_finished(active: _Active) -> bool:
        return active.sequence.finish is not None

    def _reusable_cache(self, session: Session, tokens: Sequence[int], reusable: int) -> SequenceCache:
        # The last prompt token is always evaluated anew: its logits give the first output token.
        shared = min(common_prefix(session.tokens, tokens[:-1]), reusable)
        cache, session.cache = session.cache, None
        if cache is None or not cache.can_truncate(shared):
            return self.model.new_cache()
        cache.truncate(shared)
        return cache

    def _check_tokens(self, tokens: Sequence[int], params: SamplingParams) -> None:
        size = min(self.model.vocab_size, self.tokenizer.vocab_size)
        if not tokens:
            raise InvalidOptionError("the prompt is empty; give at least one token of text")
        asked = {"prompt": tokens, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for what, ids in asked.items():
            if bad := [i for i in ids if not 0 <= i < size]:
                raise InvalidOptionError(f"{what}: token {bad[0]} is not in the vocabulary; ids are 0 to {size - 1}")
        if params.min_tokens > 0 and len(set(params.stop_token_ids)) == size:
            raise InvalidOptionError(
                f"stop_token_ids name all {size} tokens, so min_tokens={params.min_tokens} leaves nothing to emit; "
                "give fewer stop tokens or min_tokens=0"
            )
        if params.logprobs is not None and params.logprobs > size:
            raise InvalidOptionError(f"logprobs={params.logprobs} is more than the vocabulary's {size} tokens")


def load(
    model: str = "smollm2-135m",
    *,
    regime: Regime | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Engine:
    """Load a model and build an engine around it.

    Args:
        model: catalogue name, directory, ``.gguf`` file or hub id.
        regime: refuse at once, before weights load, parts that are not exact for it (else at the first request).
        progress: called with (stage, bytes done, bytes in all) while a model is fetched.
        options: the other fields of ``outrider.config.EngineConfig`` (drafter, shape, draft_model, dtype, ...).

    Raises:
        UsageError, RunError: one sentence that says what was wrong and how to fix it.
    """
    try:
        config = EngineConfig.model_validate({"model": model, **options})
    except ValidationError as error:
        raise usage_error(error) from None
    checked = Regime if regime is None else (regime,)
    refusals = [refusal for one in checked if (refusal := refusal_of(config, one)) is not None]
    if refusals and (regime is not None or len(refusals) == len(Regime)):
        raise refusals[0]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_model(config.model, config, progress)
    drafts = [load_model(name, config, progress, sharing=target) for name in config.draft_models]
    engine = Engine(config, target, drafts)
    if regime is not None:
        engine.lane(regime)
    return engine


def _shape_text(draft: DraftPlan) -> str:
    """The shape with its options; for a drafter that merges others' trees, theirs."""
    if draft.drafter.cls.merges:
        return " + ".join(f"{member.drafter.name}@{_shape_text(member)}" for member in draft.members)
    options = draft.shape.options.model_dump()
    return draft.shape.name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")
