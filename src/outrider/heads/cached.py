"""A recurrent head as a drafter runs it: packed products, and one layer's key/value cache.

The cache covers *pairs* (target features at row t, token t + 1) of the committed text: entry t of the cache is row t of
the text. Guesses' pairs (the head's own state, guessed token) are scratch entries behind them, always rolled back: what
stays was computed from target features. Attention is the decoder's own (``models/operations.py``), so queries and keys
are in its interleaved rotary order, not in the checkpoints' (half-split).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.heads.config import AttentionConfig, Feature
from outrider.heads.network import Attend, DraftNetwork, Mlp, RecurrentNetwork, RMSNorm, SelfAttention
from outrider.models.config import DecoderConfig, RopeConfig
from outrider.models.linear import Linear, packed_product
from outrider.models.operations import Norm, choose_norm, choose_operations
from outrider.models.rope import Rope, interleaved_rows


@dataclass(slots=True)
class HeadCache:
    """Keys, then values of one layer, [2 * num_kv_heads, capacity, head_dim], grown by doubling.

    ``length`` entries are committed, ``scratch`` ones speculative.
    """

    entries: Tensor
    length: int = 0
    scratch: int = 0

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more entries."""
        used = self.length + self.scratch
        if used + rows <= self.entries.shape[1]:
            return
        capacity = max(256, self.entries.shape[1])
        while capacity < used + rows:
            capacity *= 2
        heads, _, dim = self.entries.shape
        grown = self.entries.new_empty((heads, capacity, dim))
        grown[:, :used] = self.entries[:, :used]
        self.entries = grown

    def commit(self) -> None:
        """Keep every scratch entry."""
        self.length += self.scratch
        self.scratch = 0

    def rollback(self) -> None:
        """Forget every scratch entry."""
        self.scratch = 0

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` entries."""
        self.length = min(self.length, length)
        self.scratch = 0


N = TypeVar("N", bound=DraftNetwork[Any])


class CachedHead:
    """A recurrent network on its device and in its compute dtype, with attention over a ``HeadCache``.

    Args:
        network: in evaluation mode, for drafting only from now on: rows of its products are reordered and packed in
            place.
        dtype, device: of computation.
        int4: round products to 4-bit groups, as ``pack``.
    """

    def __init__(self, network: RecurrentNetwork, dtype: torch.dtype, device: torch.device, int4: bool = False) -> None:
        _interleave(network)
        self.network = pack(network, dtype, device, int4)
        self.config: AttentionConfig = network.config
        self.dtype = dtype
        self.device = device
        config = _decoder_config(self.config)
        self._operations = choose_operations(config, dtype, device)
        wide = torch.promote_types(dtype, torch.float32)
        self._rope = Rope(config.rope_full, config.head_dim, config.context_length, device, wide)

    def new_cache(self) -> HeadCache:
        """An empty cache."""
        shape = (2 * self.config.num_kv_heads, 0, self.config.head_dim)
        return HeadCache(torch.empty(shape, dtype=self.dtype, device=self.device))

    def fuse(self, features: Mapping[Feature, Tensor]) -> Tensor:
        """Target hidden states [n, H] by name -> states [n, H]."""
        return self.network.fuse({name: state.to(self.dtype) for name, state in features.items()})

    def forward(
        self,
        cache: HeadCache,
        token: Tensor,
        state: Tensor,
        positions: Sequence[int],
        mask: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Run one step for n pairs and write their entries to scratch slots.

        Args:
            token, state: [n, H].
            positions: of the pairs: the row of the feature, [n].
            mask: bool [n, scratch_before + n], which scratch entries and rows each row sees; ``None`` is causal. The
                committed entries are always visible.

        Returns:
            Outputs [n, H].
        """
        rows = len(positions)
        cache.reserve(rows)
        start = cache.length + cache.scratch
        bias = _bias(cache, rows, mask, self.dtype, self.device)
        turns = self._rope.turns(torch.tensor(positions, device=self.device), max(positions))
        dim = self.config.head_dim

        def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            qkv = torch.cat([queries, keys, values], dim=-1).view(rows, -1, dim)
            return self._operations.attention(qkv, turns, cache.entries, start, bias)

        output = self.network.step(token=token, state=state, attend=attention)
        cache.scratch += rows
        return output


def _bias(
    cache: HeadCache, rows: int, mask: NDArray[np.bool_] | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive mask [rows, entries], ``None`` when every row sees all."""
    if rows == 1 and mask is None:
        return None
    total = cache.length + cache.scratch + rows
    if mask is None:
        hidden = torch.ones((rows, total), dtype=torch.bool).triu_(total - rows + 1)
    else:
        hidden = F.pad(torch.from_numpy(~mask), (cache.length, 0))
    return torch.zeros((rows, total), dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)


def _interleave(network: RecurrentNetwork) -> None:
    """Put the rows of query and key products in interleaved rotary order, in place.

    Raises:
        ValueError: when that was done before, which would undo nothing and mix everything.
    """
    config = network.config
    if getattr(network, "is_interleaved", False):
        raise ValueError(f"this {config.method} network drafts already: load its file again")
    network.is_interleaved = True  # type: ignore[assignment]
    for module in network.modules():
        if isinstance(module, SelfAttention):
            for product, heads in ((module.q_proj, config.num_heads), (module.k_proj, config.num_kv_heads)):
                order = interleaved_rows(heads, config.head_dim).to(product.weight.device)
                for parameter in product.parameters():
                    parameter.data = parameter.data[order]


def _decoder_config(config: AttentionConfig) -> DecoderConfig:
    """The head's one layer as a decoder of one block."""
    rope = RopeConfig(config.rope_theta, dict(config.rope_scaling))
    return DecoderConfig(
        family="llama",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        norm_eps=config.norm_eps,
        rope_full=rope,
        rope_sliding=rope,
        windows=(None,),
        qk_scale=config.head_dim**-0.5,
    )


Make = Callable[[Tensor, Tensor | None], Linear]
"""Weight [out, in] and bias [out] or None -> a product."""


class _Packed(nn.Module):
    """Products of the same rows with one matrix after the other, as one product."""

    def __init__(self, linears: Sequence[nn.Linear], make: Make) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._product = make(weight, torch.cat(biases) if biases else None)

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows)


class _PackedAttention(nn.Module):
    """``SelfAttention`` with queries, keys and values from one product."""

    def __init__(self, attention: SelfAttention, make: Make) -> None:
        super().__init__()
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._sizes = [linear.out_features for linear in inputs]
        self._inputs = _Packed(inputs, make)
        self._output = _Packed([attention.o_proj], make)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self._output(attend(*self._inputs(x).split(self._sizes, dim=-1)))
        return out


class _PackedMlp(nn.Module):
    """``Mlp`` with both inputs of the gate from one product."""

    def __init__(self, mlp: Mlp, make: Make) -> None:
        super().__init__()
        self._inputs = _Packed([mlp.gate_proj, mlp.up_proj], make)
        self._output = _Packed([mlp.down_proj], make)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._inputs(x).chunk(2, dim=-1)
        out: Tensor = self._output(F.silu(gate) * up)
        return out


class _PackedNorm(nn.Module):
    """``RMSNorm`` by the function that is fastest for few rows."""

    def __init__(self, norm: RMSNorm, function: Norm) -> None:
        super().__init__()
        self._norm = norm
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self._norm.weight, self._norm.eps)


def pack(network: N, dtype: torch.dtype, device: torch.device, int4: bool = False) -> N:
    """The network in ``dtype`` on ``device``, for drafting only; on a CPU its products are prepacked, in place.

    ``int4`` rounds them to 4-bit groups, which few rows read in a quarter of the time; guesses change a little.
    """
    network.to(device, dtype)
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float32):
        norm = choose_norm(dtype, device)
        _pack_children(network, lambda weight, bias: packed_product(weight, bias, dtype, int4), norm)
        network.pack_target_rows(lambda rows: packed_product(rows, None, dtype, int4))
    return network


def _pack_children(module: nn.Module, make: Make, norm: Norm) -> None:
    for name, child in module.named_children():
        if isinstance(child, SelfAttention):
            setattr(module, name, _PackedAttention(child, make))
        elif isinstance(child, Mlp):
            setattr(module, name, _PackedMlp(child, make))
        elif isinstance(child, nn.Linear):
            setattr(module, name, _Packed([child], make))
        elif isinstance(child, RMSNorm):
            setattr(module, name, _PackedNorm(child, norm))
        else:
            _pack_children(child, make, norm)
