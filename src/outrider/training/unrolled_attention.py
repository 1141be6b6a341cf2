"""Attention of a recurrent head in training, over packed rows with several documents each.

Drafting sees, at row t and step i, the step-0 entries of rows 0 ... t (made of target features) and its own guesses'
entries, one for each step up to i, at positions t + 1 ... t + i. EAGLE-3's training-time test (arXiv 2503.01840) is
exactly that, with one causal score matrix and one diagonal score for each later step: entries of other rows' later
steps are never seen, so later steps can run on some of the rows only. MTP heads (FastMTP, arXiv 2509.18362) attend
causally over each step's own states instead. Rows see their own document only. Knows nothing of networks and losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads.config import AttentionConfig
from outrider.heads.network import Attend
from outrider.heads.rotary import Rotary
from outrider.training.batch import Batch


@dataclass(frozen=True, slots=True)
class Rows:
    """R of the T tokens of each of B batch rows.

    Attributes:
        index: int64 [B, R]; batch rows with fewer than R repeat one of theirs.
        place: int64 [B, T], where a token lies in a flattened [B * R]; undefined for tokens that are not among them.
    """

    index: Tensor
    place: Tensor

    @classmethod
    def where(cls, wanted: Tensor) -> Rows:
        """The tokens that ``wanted`` bool [B, T] marks, R being the largest count."""
        count = max(1, int(wanted.sum(dim=1).max()))
        index = wanted.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
        place = wanted.cumsum(dim=1) - 1 + torch.arange(len(wanted), device=wanted.device)[:, None] * count
        return cls(index, place)

    def take(self, values: Tensor) -> Tensor:
        """``values`` [B, T, ...] -> [B, R, ...]."""
        return values[torch.arange(len(self.index), device=values.device)[:, None], self.index]


class TrainingAttention(ABC):
    """Attention over one batch, for all its steps in order."""

    is_row_local: bool
    """Whether later steps of a row see nothing of other rows' later steps."""

    def __init__(self, config: AttentionConfig, batch: Batch) -> None:
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._rotary = Rotary(config, batch.tokens.device)
        self._batch = batch
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def at(self, step: int, rows: Rows) -> Attend:
        """Attention of ``step`` for queries, keys and values of ``rows``, [B, R, ...]."""

    def _split(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, kv_heads, group, R, dim], rotated keys and values [B, kv_heads, R, dim]."""
        size = queries.shape[:2]
        cos, sin = self._rotary.at(positions, queries.dtype)
        q = Rotary.turn(queries.view(*size, self._heads, self._dim), cos, sin)
        k = Rotary.turn(keys.view(*size, self._kv_heads, self._dim), cos, sin)
        v = values.view(*size, self._kv_heads, self._dim)
        q = q.view(*size, self._kv_heads, -1, self._dim).permute(0, 2, 3, 1, 4) * self._dim**-0.5
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def _bias(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Additive [B, 1, 1, R, T]: a row sees the tokens of its document up to itself."""
        documents = self._batch.documents
        column = torch.arange(documents.shape[1], device=documents.device)
        is_seen = (rows.take(documents)[:, :, None] == documents[:, None]) & (column <= rows.index[:, :, None])
        bias = torch.zeros(is_seen.shape, dtype=dtype, device=documents.device)
        return bias.masked_fill_(~is_seen, -torch.inf)[:, None, None]

    @staticmethod
    def _join(out: Tensor) -> Tensor:
        """[B, kv_heads, group, R, dim] -> [B, R, num_heads * dim]."""
        return out.permute(0, 3, 1, 2, 4).flatten(2)


class CausalAttention(TrainingAttention):
    """Every step attends over its own entries of all rows."""

    is_row_local = False

    def at(self, step: int, rows: Rows) -> Attend:
        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, k, v = self._split(queries, keys, values, rows.take(self._batch.positions))
            return self._join(_softmax(_scores(q, k) + self._bias(rows, q.dtype)) @ v[:, :, None])

        return attend


class UnrolledAttention(TrainingAttention):
    """Training-time test: step-0 entries causally, entries of later steps on the diagonal. Step 0 takes all rows."""

    is_row_local = True

    def __init__(self, config: AttentionConfig, batch: Batch) -> None:
        super().__init__(config, batch)
        self._first: tuple[Tensor, Tensor] | None = None
        self._later: list[tuple[Tensor, Tensor]] = []

    def at(self, step: int, rows: Rows) -> Attend:
        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, k, v = self._split(queries, keys, values, rows.take(self._batch.positions) + step)
            if step == 0:
                self._first = (k, v)
            else:
                self._later.append((k, v))
            return self._join(self._attend(q, self._bias(rows, q.dtype)))

        return attend

    def _attend(self, q: Tensor, bias: Tensor) -> Tensor:
        assert self._first is not None, "step 0 comes first"
        keys, values = self._first
        scores = _scores(q, keys) + bias
        diagonal = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in self._later]
        weights = _softmax(torch.cat([scores, *diagonal], dim=-1))
        length = keys.shape[2]
        out = weights[..., :length] @ values[:, :, None]
        for j, (_, v) in enumerate(self._later):
            out = out + weights[..., length + j, None] * v[:, :, None]
        return out


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[B, kv_heads, group, R, dim] x [B, kv_heads, T, dim] -> [B, kv_heads, group, R, T], group and rows as one."""
    flat = q.flatten(2, 3) @ k.transpose(-1, -2)
    return flat.view(*q.shape[:-1], k.shape[2])


def _softmax(scores: Tensor) -> Tensor:
    """In float32 at least, back in the scores' dtype."""
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
