"""The self-adaptive fallback threshold of EdgeLLM (Xu et al. 2023, arXiv:2309.04255, "LLMCad"), as we understand it.

Drafting goes on while the confidence of what is drafted, a product of draft probabilities, is at least alpha; then the
target checks. Afterwards alpha follows the outcome: everything accepted, and drafting may go further next time; errors,
and it stops earlier, the more so the more of them. The update rule is written from memory of the paper; the clamp is
ours.
Looks at past steps only, so that it may govern drawn guesses too. Knows no tree and no model.
"""

from __future__ import annotations

LOWEST, HIGHEST = 1e-6, 0.9
"""Limits of alpha: above 1 every guess would end the draft; at 0 no product of probabilities ever would."""
INITIAL = 0.01


class FallbackThreshold:
    """alpha of one request.

    Args:
        initial: its first value, clamped to [``LOWEST``, ``HIGHEST``].
    """

    def __init__(self, initial: float = INITIAL) -> None:
        self.alpha = _clamp(initial)

    def update(self, drafted: int, accepted: int) -> None:
        """Learn from a verification: halved when all ``drafted`` guesses were accepted, else over 0.5 ** (share wrong).

        So 2 wrong of 4 multiply alpha by 2 ** 0.5 and 4 wrong of 4 double it. Nothing drafted teaches nothing.
        """
        if drafted < 1:
            return
        wrong = max(0, drafted - accepted)
        self.alpha = _clamp(self.alpha * 0.5 if wrong == 0 else self.alpha / 0.5 ** (wrong / drafted))


def _clamp(alpha: float) -> float:
    return min(HIGHEST, max(LOWEST, alpha))
