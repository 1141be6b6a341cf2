"""History-dependent changes of the logits, as pure functions of the tokens above a tree node.

No counters are carried between steps: the history is handed in whole, so a rolled-back guess cannot leave a trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_repetition_penalty(logits: Tensor, prompt: Tensor, output: Sequence[int], penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens that were seen (Keskar et al. 2019, section 4.1).

    ``prompt`` is bool [vocabulary], true for the prompt's tokens (made once per request); prompt and output both count,
    as in transformers and vLLM. Returns a new tensor [vocabulary].
    """
    seen = prompt.clone()
    tokens = torch.tensor(output, dtype=torch.long, device=logits.device)
    seen[tokens[tokens < len(seen)]] = True
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_count_penalties(logits: Tensor, output: Sequence[int], presence: float, frequency: float) -> Tensor:
    """Subtract ``presence`` once and ``frequency`` per occurrence of each output token (OpenAI's definition).

    ``output`` excludes the prompt. Returns a new tensor [vocabulary].
    """
    tokens = torch.tensor(output, dtype=torch.long, device=logits.device)
    counts = torch.bincount(tokens, minlength=logits.shape[-1])[: logits.shape[-1]].to(logits.dtype)
    return logits - presence * (counts > 0).to(logits.dtype) - frequency * counts
