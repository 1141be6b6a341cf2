"""A draft model seen through the vocabulary that it shares with a target: the target's ids in, the target's ids out.

The token-level intersection of Timor et al. 2025 (arXiv 2502.05202): tokens that the draft does not share get a logit
of minus infinity, so that the softmax renormalises over the shared ones. Knows nothing of text: the pairs of ids are
given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.models.base import FULL, LanguageModel, Segment, SegmentOutput, SequenceCache, Sublayers


class SharedVocabulary(LanguageModel):
    """Wraps ``model``; caches are the wrapped model's own and may be used with either.

    Args:
        model: the draft model.
        target_ids, draft_ids: int64 [shared], pairs that mean the same token; ids are distinct on both sides.
        vocab_size: rows of the target's vocabulary.
    """

    def __init__(self, model: LanguageModel, target_ids: Tensor, draft_ids: Tensor, vocab_size: int) -> None:
        self.model = model
        self.name = model.name
        self.vocab_size = vocab_size
        self.context_length = model.context_length
        self.num_layers = model.num_layers
        self.hidden_size = model.hidden_size
        self.device = model.device
        self.dtype = model.dtype
        self._target_ids = target_ids.to(model.device)
        self._draft_ids = draft_ids.to(model.device)
        self.draft_of = dict(zip(target_ids.tolist(), draft_ids.tolist(), strict=True))
        """Target id -> draft id, for shared tokens."""

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        return self.model.output_rows(tokens)

    def new_cache(self) -> SequenceCache:
        return self.model.new_cache()

    def translate(self, logits: Tensor) -> Tensor:
        """Logits [rows, draft vocabulary] -> [rows, target vocabulary], minus infinity for what is not shared."""
        translated = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        translated[:, self._target_ids] = logits[:, self._draft_ids]
        return translated

    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        """See ``LanguageModel.forward``.

        Raises:
            KeyError: for a token that is not shared.
        """
        inner = [replace(segment, tokens=[self.draft_of[token] for token in segment.tokens]) for segment in segments]
        outputs = self.model.forward(inner, hidden, skip)
        return [SegmentOutput(self.translate(output.logits), output.hidden) for output in outputs]
