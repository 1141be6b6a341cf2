"""Searches the sublayers that a self-speculative draft should leave out.

After SWIFT (Xia et al. 2024, arXiv 2410.06916), which samples subsets of a fixed share while it decodes. Here a subset
is judged by the speed that its matchness and its cost promise together, and found by eliminating one sublayer after the
other (the one whose absence costs the least speed), then by seeded random moves around the best. Matchness is exact for
a chain's first guess: on text that the target wrote itself, every row sees the whole model's entries of the text before
it, as in drafting, and its own entry without the skipped sublayers. Does not store what it finds:
``drafters/layer_subsets.py`` does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.layer_costs import SublayerCosts
from outrider.errors import InvalidOptionError
from outrider.models.base import FULL, LanguageModel, Segment, SequenceCache, Sublayers, extend_cache

SHORTLIST = 8
"""Sublayers tried in a round of elimination: those that cost least when they were last tried."""
_LOWEST_MATCHNESS = 0.2
"""An elimination without a given size ends below this: no chain pays there."""

Progress = Callable[[int, int, "Candidate"], None]
"""Called with (subsets tried, subsets to try at most, the best so far)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A subset with its matchness and the best chain's expected speed over plain decoding."""

    skip: Sublayers
    matchness: float
    speedup: float
    chain: int


@dataclass(slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the fastest subset (of the size asked for).
        by_size: the fastest subset seen of each size.
        evaluations: subsets tried.
        stopped: why it ended early ("time is up", "interrupted"), or ``None``.
    """

    best: Candidate
    by_size: dict[int, Candidate] = field(default_factory=dict)
    evaluations: int = 0
    stopped: str | None = None


class MatchMeter:
    """Measures matchness on fixed texts: one pass over all of them for each subset.

    Args:
        model: must support ``skip``.
        texts: (prompt, what the model itself said next), token ids; outputs of one token say nothing and are left out.

    Raises:
        InvalidOptionError: when no text has two output tokens.
    """

    def __init__(self, model: LanguageModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        self.model = model
        self._rows = [list(output[:-1]) for _, output in texts if len(output) > 1]
        if not self._rows:
            raise InvalidOptionError("the model's answers are too short to search layers on; give other prompts")
        self._caches = [_prefilled(model, prompt) for prompt, output in texts if len(output) > 1]
        self._best = self._run(FULL)  # leaves the whole model's entries in the first scratch slots

    @property
    def tokens(self) -> int:
        """Next-token predictions that a measurement compares."""
        return sum(len(rows) for rows in self._rows)

    def measure(self, skip: Sublayers) -> float:
        """Share of rows whose best next token is the whole model's."""
        return float((self._run(skip) == self._best).double().mean())

    @torch.inference_mode()
    def _run(self, skip: Sublayers) -> Tensor:
        """Best next token of every row, [tokens]; only the entries of a run without ``skip`` stay."""
        segments = []
        for cache, rows in zip(self._caches, self._rows, strict=True):
            positions = range(cache.length, cache.length + len(rows))
            mask = _own_entry_mask(len(rows)) if cache.scratch else None
            segments.append(Segment(cache, rows, positions, mask))
        outputs = self.model.forward(segments, skip=skip)
        for cache, rows in zip(self._caches, self._rows, strict=True):
            cache.scratch = len(rows)  # slots behind these are written anew by the next run
        return torch.cat([output.logits.argmax(dim=-1) for output in outputs])


def _prefilled(model: LanguageModel, prompt: Sequence[int]) -> SequenceCache:
    cache = model.new_cache()
    extend_cache(model, cache, prompt)
    return cache


def _own_entry_mask(rows: int) -> NDArray[np.bool_]:
    """bool [rows, 2 * rows]: the whole model's entries of the rows before, and a row's own new entry."""
    return np.concatenate([np.tri(rows, rows, -1, dtype=np.bool_), np.eye(rows, dtype=np.bool_)], axis=1)


class LayerSearch:
    """One search.

    Args:
        measure: matchness of a subset.
        costs: measured seconds of the model's parts.
        num_layers: blocks of the model.
        size: how many sublayers to leave out; ``None`` lets the expected speed decide.
        seed: of the random moves.
        moves: random moves after the elimination at most.
        deadline: ``time.monotonic()`` at which to stop.
        progress: told after every subset.
    """

    def __init__(
        self,
        measure: Callable[[Sublayers], float],
        costs: SublayerCosts,
        num_layers: int,
        size: int | None = None,
        seed: int = 0,
        moves: int = 200,
        deadline: float = float("inf"),
        progress: Progress | None = None,
    ) -> None:
        if size is not None and not 1 <= size < 2 * num_layers:
            raise InvalidOptionError(
                f"{size} of {2 * num_layers} sublayers cannot be left out: give 1 to {2 * num_layers - 1}"
            )
        self._measure = measure
        self._costs = costs
        self._num_layers = num_layers
        self._size = size
        self._random = random.Random(seed)
        self._moves = moves
        self._deadline = deadline
        self._progress = progress
        self._known: dict[Sublayers, Candidate] = {}
        self._by_size: dict[int, Candidate] = {}
        self._total = 2 * num_layers + SHORTLIST * ((size or 2 * num_layers) - 1) + moves

    def run(self) -> SearchResult:
        """Eliminate, then move; Ctrl-C or the deadline ends it with the best so far. One subset is always tried."""
        stopped = None
        try:
            self._eliminate()
            self._move_around()
        except TimeoutError:
            stopped = "time is up"
        except KeyboardInterrupt:
            stopped = "interrupted"
        best = self._best()
        if best is None:  # interrupted during the very first pass
            raise KeyboardInterrupt
        return SearchResult(best, dict(sorted(self._by_size.items())), len(self._known), stopped)

    def _best(self) -> Candidate | None:
        """The fastest subset of the size asked for; while there is none, of the largest size so far."""
        if not self._by_size:
            return None
        if self._size is not None:
            return self._by_size.get(self._size) or self._by_size[max(self._by_size)]
        return max(self._by_size.values(), key=lambda candidate: candidate.speedup)

    def _try(self, skip: Sublayers) -> Candidate:
        if skip in self._known:
            return self._known[skip]
        if self._known and time.monotonic() >= self._deadline:
            raise TimeoutError
        matchness = self._measure(skip)
        speedup, chain = self._costs.best_chain(matchness, self._costs.draft(skip, self._num_layers))
        candidate = self._known[skip] = Candidate(skip, matchness, speedup, chain)
        same_size = self._by_size.get(len(skip))
        if same_size is None or candidate.speedup > same_size.speedup:
            self._by_size[len(skip)] = candidate
        best = self._best()
        if self._progress is not None and best is not None:
            self._progress(len(self._known), self._total, best)
        return candidate

    def _eliminate(self) -> None:
        """Greedy backward elimination, a shortlist a round."""
        largest = self._size or 2 * self._num_layers - 1
        skip: Sublayers = FULL
        speed, _ = self._costs.best_chain(1.0, self._costs.draft(FULL, self._num_layers))
        losses = {s: speed - self._try(frozenset({s})).speedup for s in range(2 * self._num_layers)}
        while len(skip) < largest:
            left = sorted((s for s in losses if s not in skip), key=losses.__getitem__)
            tried = {s: self._try(skip | {s}) for s in left[:SHORTLIST]}
            losses.update({s: speed - candidate.speedup for s, candidate in tried.items()})
            chosen = max(tried, key=lambda s: tried[s].speedup)
            skip, speed = skip | {chosen}, tried[chosen].speedup
            if self._size is None and tried[chosen].matchness < _LOWEST_MATCHNESS:
                break

    def _move_around(self) -> None:
        """Hill climbing from the best: exchange a sublayer for another, or (when the size is free) add or drop one."""
        best = self._best()
        for _ in range(self._moves):
            if best is None:
                return
            candidate = self._try(self._neighbour(best.skip))
            if candidate.speedup > best.speedup:
                best = candidate

    def _neighbour(self, skip: Sublayers) -> Sublayers:
        kept = sorted(frozenset(range(2 * self._num_layers)) - skip)
        out, back = self._random.choice(kept), self._random.choice(sorted(skip))
        kind = "exchange" if self._size is not None else self._random.choice(("exchange", "add", "drop"))
        if kind == "add" and len(kept) > 1:
            return skip | {out}
        if kind == "drop" and len(skip) > 1:
            return skip - {back}
        return (skip - {back}) | {out}
