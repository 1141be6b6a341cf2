"""What a drafter would have kept along a recorded greedy answer, without decoding it again.

Greedy text does not depend on the drafter, so a guess is accepted exactly when the recorded text continues so. One pass
of the target over the text gives the hidden states that heads read; beside it a drafter costs only its own passes. For
drafters whose guesses depend on the text alone: those that draft with the target's own cache (``layer_skip``) find
it empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import DraftBudget, DraftContext, Observation
from outrider.engine.engine import Engine
from outrider.models.base import PREFILL_ROWS, Segment
from outrider.sampling.draw import SeededStream
from outrider.sampling.params import SamplingParams
from outrider.types import Regime


@dataclass(frozen=True, slots=True)
class AlongCounts:
    """Passes of the target behind the prompt's, guesses, and guesses that the text spells."""

    passes: int
    drafted: int
    accepted: int


@torch.inference_mode()
def guess_along(engine: Engine, prompt: Sequence[int], answer: Sequence[int], limit: int) -> AlongCounts:
    """Let the engine's drafter guess along ``answer``, with the controller off.

    Args:
        answer: the target's own greedy answer, at least one token.
        limit: tokens that the answer might have had.
    """
    lane = engine.lane(Regime.GREEDY)
    text, start = [*prompt, *answer], len(prompt)
    hidden = _states(engine, text[:-1], lane.drafter.hidden)
    pipeline = engine.pipeline(SamplingParams(max_tokens=limit), prompt)
    session = lane.drafter.new_session()
    session.begin(DraftContext(prompt, pipeline, SeededStream(0), engine.model, engine.model.new_cache()))
    before = _rows(hidden, 0, start - 1)
    session.observe(Observation(answer[:1], _rows(hidden, start - 1, start), prompt_hidden=before))
    passes = drafted = accepted = 0
    at = start + 1  # first token that is not committed
    while at < len(text):
        depth = start + limit - at - 1  # the last token is the target's own
        tree = session.propose(DraftBudget(lane.drafter.tree_size if depth else 0, depth)).tree
        kept = len(tree.walk(text[at:]))
        passes, drafted, accepted = passes + 1, drafted + tree.drafted, accepted + kept
        stop = min(at + kept + 1, len(text))
        session.observe(Observation(text[at:stop], _rows(hidden, at - 1, stop - 1), accepted=kept))
        at = stop
    session.end()
    return AlongCounts(passes, drafted, accepted)


def _states(engine: Engine, tokens: Sequence[int], names: Sequence[str | int]) -> dict[str | int, Tensor]:
    """The target's hidden states [len(tokens), hidden] by name."""
    cache = engine.model.new_cache()
    parts = []
    for first in range(0, len(tokens) if names else 0, PREFILL_ROWS):
        chunk = tokens[first : first + PREFILL_ROWS]
        with cache.speculation():
            parts.append(engine.model.forward([Segment(cache, chunk, logit_rows=())], names)[0].hidden)
            cache.commit(range(len(chunk)))
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _rows(hidden: Mapping[str | int, Tensor], start: int, stop: int) -> dict[str | int, Tensor]:
    return {name: state[start:stop] for name, state in hidden.items()}
