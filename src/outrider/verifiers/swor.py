"""Recursive rejection without replacement (Sequoia, Chen et al. 2024, arXiv:2402.12374, algorithm 2), by its name.

The rule is ``MultiStep``: a trial drawn without replacement brings q with the earlier siblings removed and
renormalised. This name takes nothing but such draws, so that a configuration that asks for Sequoia's rule gets it or is
refused.
"""

from __future__ import annotations

from typing import ClassVar

from outrider.types import ProposalKind, Regime, Topology
from outrider.verifiers.base import Exactness, exactness
from outrider.verifiers.multi_step import MultiStep


class SamplingWithoutReplacement(MultiStep):
    """``MultiStep`` for draws without replacement only."""

    exact_for: ClassVar[Exactness] = exactness([ProposalKind.WITHOUT_REPLACEMENT], list(Topology), list(Regime))
    summary = "recursive rejection sampling over draws without replacement (multi_step, for these only)"
    source = "Sequoia, Chen et al. 2024, arXiv:2402.12374, algorithm 2"
