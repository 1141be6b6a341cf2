"""Draft with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): three layers of the target fused, states fed back.

The default shape is EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858). The network is ``heads/eagle3.py``; its
cache and its pairs are ``feature_session.py``'s.
"""

from __future__ import annotations

from outrider.drafters.feature_session import RecurrentHeadDrafter


class Eagle3Drafter(RecurrentHeadDrafter):
    """EAGLE-3, any shape."""

    method = "eagle3"
    default_shape = "best_first:16,preset=eagle2"
    summary = "a trained layer over three fused layers of the target, fed with its own states"
    source = "EAGLE-3, Li et al. 2025, arXiv:2503.01840"
