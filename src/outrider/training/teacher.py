"""What a target says about draft tokens: frozen embeddings and output rows, logits, true probabilities, best tokens.

Plain tensors, not a module, so that no checkpoint of a head contains them. The target's logits are its output rows
times its final hidden state (soft-capped where it does so); with the log of the sum of exp over the whole vocabulary,
which the feature files keep, the draft tokens' true probabilities need no product with the other rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.base import LanguageModel


class Teacher:
    """A target's frozen numbers over a draft vocabulary.

    Args:
        target: gives embeddings, output rows and soft cap.
        draft_ids: int64 [Vd], ascending target tokens that the head can guess; ``None`` for all.
        dtype, device: of the tensors: what training computes in.

    Attributes:
        embedding: [V, H], what the target's block 0 receives for each token.
        rows: [Vd, H], output rows of the draft tokens.
        ids: int64 [Vd].
    """

    def __init__(
        self, target: LanguageModel, draft_ids: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        vocabulary = torch.arange(target.vocab_size)
        with torch.no_grad():
            self.embedding = _for_autograd(target.embed(vocabulary).to(device, dtype))
            self.rows = _for_autograd(target.output_rows(draft_ids).to(device, dtype))
        self.ids = (vocabulary if draft_ids is None else draft_ids).to(device)
        self._index = torch.full((target.vocab_size,), -1, device=device)
        self._index[self.ids] = torch.arange(len(self.ids), device=device)
        self._soft_cap = target.final_soft_cap

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., H]."""
        return F.embedding(tokens, self.embedding)

    def draft_index(self, tokens: Tensor) -> Tensor:
        """Target tokens [...] (-1: not known) -> draft indices [...]; -1 outside the draft vocabulary."""
        return torch.where(tokens >= 0, self._index[tokens], -1)

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """Final hidden states [..., H] -> the target's logits of the draft tokens, at least float32 [..., Vd]."""
        logits = F.linear(final.to(self.rows.dtype), self.rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self._soft_cap is None else self._soft_cap * torch.tanh(logits / self._soft_cap)

    @staticmethod
    def true_probabilities(logits: Tensor, log_sum: Tensor) -> Tensor:
        """Logits [..., Vd] and ``Batch.log_sum`` [...] -> probabilities over the whole vocabulary: sum at most 1."""
        return torch.exp(logits - log_sum[..., None])


def _for_autograd(tensor: Tensor) -> Tensor:
    """Models run in inference mode, and what they return there cannot be a factor of a trained product."""
    return tensor.clone() if tensor.is_inference() else tensor
