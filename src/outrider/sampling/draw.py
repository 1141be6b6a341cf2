"""Counter-based random draws: every decision is a function of (seed, position, role, draw), never of call order.

So a request's output does not depend on its batch neighbours, and a rolled-back guess consumes nothing. Keys:

* ``Role.TARGET``: position = index of the output token being decided. One draw per position, whatever the drafter;
  plain sampling and sample-match verification therefore give the same text for the same seed.
* ``Role.DRAFT`` and ``Role.ACCEPT``: position = output tokens kept when the step began, draw = a counter inside the
  step. Steps begin at different positions, so no key is used twice and drafts are independent of accept tests.

Tests replace ``RandomStream`` by one that walks through every outcome, which turns the production drafters and
verifiers into exact enumerations of their own output law.
"""

from __future__ import annotations

import hashlib
import secrets

import torch
from torch import Tensor

from outrider.types import RandomStream, Role

__all__ = ["OffsetStream", "RandomStream", "Role", "SeededStream"]


class OffsetStream:
    """Another stream's draws under counters of its own: two drafters of one step must not share a key."""

    def __init__(self, stream: RandomStream, member: int) -> None:
        self._stream = stream
        self._offset = member * 2**40

    def bernoulli(self, probability: float, position: int, role: Role, draw: int) -> bool:
        return self._stream.bernoulli(probability, position, role, self._offset + draw)

    def categorical(self, probabilities: Tensor, position: int, role: Role, draw: int) -> int:
        return self._stream.categorical(probabilities, position, role, self._offset + draw)


class SeededStream:
    """Draws keyed by hashing (seed, position, role, draw); 53-bit uniforms from BLAKE2b."""

    def __init__(self, seed: int | None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed

    def uniform(self, position: int, role: Role, draw: int) -> float:
        """A number in [0, 1)."""
        key = b"%d,%d,%d,%d" % (self.seed, position, role, draw)
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53

    def bernoulli(self, probability: float, position: int, role: Role, draw: int) -> bool:
        return self.uniform(position, role, draw) < probability

    def categorical(self, probabilities: Tensor, position: int, role: Role, draw: int) -> int:
        cumulative = torch.cumsum(probabilities.to(torch.float64), dim=-1)
        threshold = self.uniform(position, role, draw) * float(cumulative[-1])
        # The first index whose cumulative mass exceeds the threshold; it always has positive probability.
        index = int(torch.searchsorted(cumulative, threshold, right=True))
        return min(index, int(torch.searchsorted(cumulative, cumulative[-1])))
