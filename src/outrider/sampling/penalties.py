"""History-dependent changes of the logits, as pure functions of the tokens above a tree node.

No counters are carried between steps: the history is handed in whole, so a rolled-back guess cannot leave a trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_repetition_penalty(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens in ``seen`` (Keskar et al. 2019, section 4.1).

    ``seen`` is prompt and output together, as in transformers and vLLM. Returns a new tensor [vocabulary].
    """
    tokens = _unique_in_range(seen, logits)
    chosen = logits[tokens]
    result = logits.clone()
    result[tokens] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    return result


def apply_count_penalties(logits: Tensor, output: Sequence[int], presence: float, frequency: float) -> Tensor:
    """Subtract ``presence`` once and ``frequency`` per occurrence of each output token (OpenAI's definition).

    ``output`` excludes the prompt. Returns a new tensor [vocabulary].
    """
    tokens = torch.tensor(output, dtype=torch.long, device=logits.device)
    counts = torch.bincount(tokens, minlength=logits.shape[-1])[: logits.shape[-1]].to(logits.dtype)
    return logits - presence * (counts > 0).to(logits.dtype) - frequency * counts


def _unique_in_range(tokens: Sequence[int], logits: Tensor) -> Tensor:
    size = logits.shape[-1]
    return torch.tensor(sorted({t for t in tokens if t < size}), dtype=torch.long, device=logits.device)
