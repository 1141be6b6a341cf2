"""From a loaded model and some prompts to a searched layer subset: writes the text, times the parts, searches, checks.

A quarter of the prompts is kept from the search; matchness on their answers says what the winner is worth on text that
it was not chosen by. Stores nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.drafters.layer_subsets import LayerSubset, format_skip
from outrider.engine.engine import Engine, Prompt
from outrider.engine.layer_costs import SublayerCosts, measure_costs
from outrider.engine.layer_search import LayerSearch, MatchMeter, Progress, SearchResult
from outrider.errors import InvalidOptionError
from outrider.sampling.params import SamplingParams

_HELD_OUT_EVERY = 4

Stage = Callable[[str], None]
"""Told what begins: ``text``, ``costs``, ``search``."""


@dataclass(frozen=True, slots=True)
class LayerTuning:
    """How long and how wide to search.

    Attributes:
        skip_share: share of all sublayers to leave out; ``None`` lets the expected speed decide.
        max_tokens: tokens of each prompt's answer.
        moves: random moves after the elimination.
        seed: of those moves.
        max_seconds: of the search itself; writing the text and timing the parts come before.
    """

    skip_share: float | None = None
    max_tokens: int = 48
    moves: int = 100
    seed: int = 0
    max_seconds: float = 600.0

    def size(self, num_layers: int) -> int | None:
        """Sublayers to leave out of a model of ``num_layers`` blocks, at least one and never all."""
        if self.skip_share is None:
            return None
        return min(2 * num_layers - 1, max(1, round(self.skip_share * 2 * num_layers)))


@dataclass(frozen=True, slots=True)
class TunedLayers:
    """What was found, ready to be stored, and all that was seen on the way."""

    subset: LayerSubset
    search: SearchResult
    costs: SublayerCosts


def tune_layers(
    engine: Engine,
    prompts: Sequence[Prompt],
    tuning: LayerTuning,
    command: str,
    progress: Progress | None = None,
    stage: Stage | None = None,
) -> TunedLayers:
    """Search the sublayers that the engine's model should leave out when it drafts for itself.

    Args:
        engine: its model is used, nothing else of it.
        prompts: two at least; the model's own greedy answers to them are what a subset is judged on.
        tuning: sizes and limits.
        command: recorded, to search again.
        progress: told after every subset.
        stage: told what begins.

    Raises:
        InvalidOptionError: a model that cannot leave layers out or has one block only, too few prompts, answers that
            are too short.
    """
    model = engine.model
    if not model.supports_skip:
        raise InvalidOptionError(
            f"the layers of '{engine.config.model}' cannot be searched: it cannot leave layers out; "
            "use a model that runs without --fallback"
        )
    if model.num_layers < 2:
        raise InvalidOptionError(f"'{engine.config.model}' has a single block; there is no layer to leave out")
    if len(prompts) < 2:
        raise InvalidOptionError("one prompt is too few to search on and to check with; give two or more")
    announce = stage or (lambda _: None)
    announce("text")
    texts = [text for text in _write(engine, prompts, tuning.max_tokens) if len(text[1]) > 1]
    if len(texts) < 2:
        raise InvalidOptionError(f"only {len(texts)} of the model's answers has two tokens or more; give other prompts")
    last = len(texts) - 1
    is_held_out = [index % _HELD_OUT_EVERY == min(last, _HELD_OUT_EVERY - 1) for index in range(len(texts))]
    meter = MatchMeter(model, [text for text, held in zip(texts, is_held_out, strict=True) if not held])
    check = MatchMeter(model, [text for text, held in zip(texts, is_held_out, strict=True) if held])
    announce("costs")
    costs = measure_costs(model)
    announce("search")
    size = tuning.size(model.num_layers)
    deadline = time.monotonic() + tuning.max_seconds
    search = LayerSearch(meter.measure, costs, model.num_layers, size, tuning.seed, tuning.moves, deadline, progress)
    result = search.run()
    best = result.best
    subset = LayerSubset(
        model=engine.config.model,
        skip=format_skip(best.skip),
        matchness=round(best.matchness, 4),
        held_out=round(check.measure(best.skip), 4),
        speedup=round(best.speedup, 4),
        chain=best.chain,
        tokens=meter.tokens,
        seed=tuning.seed,
        evaluations=result.evaluations,
        command=command,
    )
    return TunedLayers(subset, result, costs)


def _write(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[list[int], tuple[int, ...]]]:
    """The prompts' tokens and the model's greedy answers."""
    plain, params = engine.plain(), SamplingParams.parse(max_tokens=max_tokens)
    encoded = [engine.encode(prompt) for prompt in prompts]
    return [(tokens, plain.generate(tokens, params).tokens) for tokens in encoded]
