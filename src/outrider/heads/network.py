"""The contract of a draft network: one definition of its mathematics, used by training and by drafting alike.

A network never embeds tokens itself: callers pass embeddings (``LanguageModel.embed``). Its output matrix is its own
(``lm_head``) or the target's rows of the draft vocabulary, given by ``bind``. Attention is a function that the caller
passes in, for only the caller knows about caches, masks and positions: training unrolls steps over whole rows
(``training/``), drafting extends a cache by a few tree nodes (``heads/cached.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.config import AttentionConfig, Feature, HeadConfig
from outrider.heads.spec import HeadSpec


class Attend(Protocol):
    """Attention of a layer's rows over whatever the caller lets them see.

    Queries are [..., num_heads * head_dim], keys and values [..., num_kv_heads * head_dim], not rotated; the result has
    the queries' shape.
    """

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


C = TypeVar("C", bound=HeadConfig)


class DraftNetwork(nn.Module, ABC, Generic[C]):
    """A head's tensors and mathematics. ``state_dict`` keys are exactly the names of ``spec.expected``.

    Attributes:
        config: sizes and flags.
        draft_ids: int64 [draft_vocab_size], the target token of each draft token, ascending; ``None`` for all.
    """

    spec: ClassVar[HeadSpec]
    Config: ClassVar[type[HeadConfig]]

    def __init__(self, config: C) -> None:
        super().__init__()
        self.config = config
        self.draft_ids: Tensor | None = None
        self._target_rows: tuple[Tensor, ...] = ()  # a tuple: modules would register and save a bare tensor's owner
        self._target_product: Callable[[Tensor], Tensor] | None = None
        self._soft_cap: float | None = None

    @property
    def needs_target_rows(self) -> bool:
        """Whether logits are products with the target's output rows (no output matrix of its own)."""
        return True

    def bind(self, rows: Tensor | None, soft_cap: float | None = None) -> None:
        """Use ``rows`` [draft_vocab_size, H] of the target's output matrix for logits (frozen, never saved).

        ``soft_cap``: as ``LanguageModel.final_soft_cap``.
        """
        self._target_rows = () if rows is None else (rows,)
        self._target_product = None
        self._soft_cap = soft_cap

    def pack_target_rows(self, prepare: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
        """From now on ``prepare(rows)``, called once, multiplies by the bound rows, if there are any."""
        if self._target_rows:
            self._target_product = prepare(self._target_rows[0])

    def target_logits(self, state: Tensor) -> Tensor:
        """``state`` [..., H] times the bound rows: [..., draft_vocab_size]."""
        if not self._target_rows:
            raise ValueError(f"{type(self).__name__} has no output rows: call bind first")
        if self._target_product is not None:
            logits = self._target_product(state)
        else:
            logits = F.linear(state, self._target_rows[0].to(state.dtype))
        return logits if self._soft_cap is None else torch.tanh(logits / self._soft_cap) * self._soft_cap

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return self.spec.expected(self.config.symbols(), self.config.flags())

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Set every parameter for the start of training, from a generator of its own."""

    def adopt_final_norm(self, weight: Tensor) -> None:
        """Start the norm in front of the target's output rows as the target's own, weight [H]; after ``initialise``."""


class RecurrentNetwork(DraftNetwork[AttentionConfig]):
    """A head that reads target features once and then its own states: EAGLE, EAGLE-3, MTP.

    Row t, step 0: ``state = fuse(features at t)``; step i: ``output = step(token = E(x_{t+1+i}), state, attend)``,
    ``logits(output)`` predicts x_{t+2+i}, and ``recur(output)`` is the state of step i + 1.
    """

    @abstractmethod
    def fuse(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """Target hidden states [..., target hidden] of ``config.features`` by name -> state [..., H]."""

    @abstractmethod
    def step(self, *, token: Tensor, state: Tensor, attend: Attend) -> Tensor:
        """Embedding of the newest token [..., H] and the state that goes with it [..., H] -> output [..., H]."""

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., Vd]."""

    def recur(self, output: Tensor) -> Tensor:
        """What the next step reads as its state."""
        return output


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, weight [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Mlp(nn.Module):
    """Gated feed-forward of the Llama family."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class SelfAttention(nn.Module):
    """Projections of one attention layer; the attention itself is the caller's.

    ``inputs`` is the width that queries, keys and values are made of (2 * H in EAGLE-3).
    """

    def __init__(self, config: AttentionConfig, inputs: int, bias: bool = False) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        return out


def copy_(parameter: Tensor, values: Tensor) -> None:
    """Fill a parameter with ``values``, whatever their device and dtype."""
    with torch.no_grad():
        parameter.copy_(values)


def normal_(tensor: Tensor, generator: torch.Generator, std: float = 0.02) -> None:
    """Fill with normal draws of ``generator``, whatever device the tensor is on."""
    with torch.no_grad():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)


def start_plainly(module: nn.Module, seed: int) -> None:
    """Norms 1, biases 0, products normal with standard deviation 0.02, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            normal_(parameter, generator)
