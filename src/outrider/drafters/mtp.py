"""Draft with an MTP head (DeepSeek-V3, arXiv 2412.19437; FastMTP, arXiv 2509.18362): one decoder layer, unrolled.

The network is ``heads/mtp.py``; its cache and its pairs are ``feature_session.py``'s. Public heads are trained with
attention over one step's own states; drafting keeps committed pairs of target features and puts the guesses' pairs
behind them, as vLLM does.
"""

from __future__ import annotations

from outrider.drafters.feature_session import RecurrentHeadDrafter


class MtpDrafter(RecurrentHeadDrafter):
    """Multi-token prediction with one shared layer, any shape."""

    method = "mtp"
    default_shape = "chain:3"
    summary = "a trained decoder layer over token and last hidden state, unrolled, with the target's own output matrix"
    source = "DeepSeek-V3, DeepSeek-AI 2024, arXiv:2412.19437; FastMTP, Cai et al. 2025, arXiv:2509.18362"
