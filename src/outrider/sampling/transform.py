"""The logits pipeline: the only code that turns logits into probabilities.

Plain decoding, the target at every tree node and every drafter use this one function, so p and q can differ only by
their logits. The order is fixed: penalties, bias, ``min_tokens``, temperature, top-k, top-p, min-p. All arithmetic on
probabilities is float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.params import SamplingParams
from outrider.sampling.penalties import apply_count_penalties, apply_repetition_penalty
from outrider.types import Regime


class LogitsPipeline:
    """A request's parameters as a function of (logits, the tokens above the node).

    Args:
        params: the request's parameters.
        vocab_size: tokens that the tokenizer knows; rows of the head beyond it are padding and never emitted.
        stop_ids: token ids that end the sequence (masked while fewer than ``min_tokens`` are out).
        prompt: the prompt's tokens, for the repetition penalty.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.stop_ids = tuple(sorted(i for i in stop_ids if i < vocab_size))
        self.prompt = tuple(prompt)
        self._prompt_seen: Tensor | None = None
        self._has_counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._has_repetition = params.repetition_penalty != 1.0
        self.uses_history = self._has_counts or self._has_repetition or params.min_tokens > 0

    @property
    def regime(self) -> Regime:
        return self.params.regime

    @property
    def changes_logits(self) -> bool:
        """Whether ``process`` does anything besides cutting off the padding."""
        return self.uses_history or bool(self.params.logit_bias)

    def process(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Logits [>= vocab_size] -> penalised, biased and masked logits [vocab_size] (before temperature).

        ``output`` is every output token above this position: the committed ones, then the tree path.
        """
        params = self.params
        logits = logits[: self.vocab_size]
        if not self.changes_logits:
            return logits
        logits = logits.to(torch.float64)
        if self._has_repetition:
            seen = self._prompt_tokens(logits.device)
            logits = apply_repetition_penalty(logits, seen, output, params.repetition_penalty)
        if self._has_counts and output:
            logits = apply_count_penalties(logits, output, params.presence_penalty, params.frequency_penalty)
        if params.logit_bias:
            logits = logits.clone()
            for token, bias in params.logit_bias.items():
                logits[token] += bias
        if len(output) < params.min_tokens and self.stop_ids:
            logits = logits.clone()
            logits[list(self.stop_ids)] = -torch.inf
        return logits

    def _prompt_tokens(self, device: torch.device) -> Tensor:
        """bool [vocab_size], true for the prompt's tokens."""
        if self._prompt_seen is None:
            inside = [token for token in self.prompt if token < self.vocab_size]
            self._prompt_seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
            self._prompt_seen[torch.tensor(inside, dtype=torch.long, device=device)] = True
        return self._prompt_seen

    def greedy_token(self, logits: Tensor, output: Sequence[int]) -> int:
        """Best token after ``process``; the lowest id wins an exact tie."""
        return int(self.process(logits, output).float().argmax())

    def probabilities(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """The distribution, float64 [vocab_size], that the request samples from at this position.

        At temperature 0 it is one-hot on ``greedy_token``.
        """
        if self.regime is Regime.GREEDY:
            one_hot = torch.zeros(self.vocab_size, dtype=torch.float64, device=logits.device)
            one_hot[self.greedy_token(logits, output)] = 1.0
            return one_hot
        processed = self.process(logits, output).to(torch.float64)
        # The best logit becomes 0 first: a tiny temperature or a huge bias would overflow and make everything NaN.
        scaled = (processed - processed.max()) / self.params.temperature
        return truncate(torch.softmax(scaled, dim=-1), self.params.top_k, self.params.top_p, self.params.min_p)

    def ranking(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Scores for choosing deterministic guesses: ``probabilities``, but at temperature 0 those of temperature 1."""
        if self.regime is Regime.SAMPLED:
            return self.probabilities(logits, output)
        return torch.softmax(self.process(logits, output).float(), dim=-1)


def truncate(probabilities: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Keep the top-k tokens, then the smallest set reaching ``top_p``, then those above ``min_p`` times the best.

    Args:
        probabilities: [vocabulary], summing to 1.

    Returns:
        A renormalised tensor of the same shape. The best token always stays. Ties are broken by token id.
    """
    size = probabilities.shape[-1]
    if 0 < top_k < size or top_p < 1.0:
        limit = top_k if 0 < top_k < size else size
        # A stable sort fixes which of several equal tokens stays, so that p and q agree on it.
        values, order = torch.sort(probabilities, descending=True, stable=True)
        values = values[:limit]
        if top_p < 1.0:
            mass_before = torch.cumsum(values, dim=-1) - values
            values = values[mass_before < top_p * values.sum()]
        kept = torch.zeros_like(probabilities)
        kept[order[: len(values)]] = values
        probabilities = kept / kept.sum()
    if min_p > 0.0:
        probabilities = torch.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)
        probabilities = probabilities / probabilities.sum()
    return probabilities
