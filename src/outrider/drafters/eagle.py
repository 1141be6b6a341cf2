"""Draft with an EAGLE head (Li et al. 2024, arXiv 2401.15077): a layer that continues the target's last hidden state.

The default shape is EAGLE-2's dynamic tree (arXiv 2406.16858); EAGLE-1's fixed tree of 25 guesses is
``static:eagle_25``. The network is ``heads/eagle.py``; its cache and its pairs are ``feature_session.py``'s.
"""

from __future__ import annotations

from outrider.drafters.feature_session import RecurrentHeadDrafter


class EagleDrafter(RecurrentHeadDrafter):
    """EAGLE-1 and EAGLE-2, any shape."""

    method = "eagle"
    default_shape = "best_first:16,preset=eagle2"
    summary = "a trained layer that continues the target's last hidden state, fed with its own"
    source = "EAGLE and EAGLE-2, Li et al. 2024, arXiv:2401.15077 and arXiv:2406.16858"
