"""Our decoder for the Llama, Mistral, Qwen2, Qwen3, Gemma-2 and Gemma-3 families: few operations, no module tree.

All sequences' rows are one flat batch for norms and products; attention runs per sequence over its own cache, so ragged
batches need no padding and a row's result involves its own sequence only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.attention import attention_bias
from outrider.models.base import FINAL_HIDDEN, FULL, LanguageModel, Segment, SegmentOutput, Sublayers
from outrider.models.cache import KVCache
from outrider.models.checkpoint import Checkpoint
from outrider.models.config import DecoderConfig
from outrider.models.linear import INT4_BLOCK, Linear
from outrider.models.operations import Place, choose_operations
from outrider.models.request import check_request
from outrider.models.rope import Rope, interleaved_rows
from outrider.models.weights import WeightFormat, WeightLoader, WeightPlan


@dataclass(slots=True)
class Block:
    """One transformer block's weights. ``gate_up`` stacks the gate's rows on the up projection's."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    after_mlp_norm: Tensor | None
    is_sliding: bool


@dataclass(slots=True)
class _Rows:
    """One segment's place in a forward pass: its rows, and a bias and write offset per window group."""

    cache: KVCache
    start: int
    stop: int
    positions: list[int]
    offsets: list[int]
    biases: list[Tensor | None]


class Decoder(LanguageModel):
    """A decoder-only transformer held in one ``WeightPlan``."""

    def __init__(self, checkpoint: Checkpoint, plan: WeightPlan) -> None:
        config = checkpoint.config
        loader = WeightLoader(checkpoint, plan)
        self.config = config
        self.plan = plan
        self.name = checkpoint.source
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.num_layers = config.num_layers
        self.hidden_size = config.hidden_size
        self.final_soft_cap = config.final_soft_cap
        self.device = plan.device
        self.dtype = plan.dtype
        self.embedding = loader.matrix("model.embed_tokens.weight")
        self.blocks = [load_block(loader, config, index) for index in range(config.num_layers)]
        self.final_norm = loader.vector("model.norm.weight", config.norm_offset)
        is_tied = config.tie_embeddings or "lm_head.weight" not in loader.names
        self.head = loader.head(checkpoint.tensor("model.embed_tokens.weight" if is_tied else "lm_head.weight"))
        self._output_tensor = partial(checkpoint.tensor, "model.embed_tokens.weight" if is_tied else "lm_head.weight")
        self.has_int4 = loader.has_int4
        self.operations = choose_operations(config, plan.dtype, plan.device)
        self._ropes = {
            False: Rope(config.rope_full, config.head_dim, config.context_length, plan.device),
            True: Rope(config.rope_sliding, config.head_dim, config.context_length, plan.device),
        }
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=plan.dtype).item()

    @property
    def supports_skip(self) -> bool:
        return True

    @property
    def weight_format(self) -> str:
        if self.has_int4:
            return WeightFormat.INT4.value
        return WeightFormat.INT8.value if self.plan.format is WeightFormat.INT8 else super().weight_format

    @property
    def cheap_rows(self) -> int:
        return INT4_BLOCK if self.has_int4 else super().cheap_rows

    def new_cache(self) -> KVCache:
        return KVCache(self.config, self.plan.dtype, self.device)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens.to(self.device), self.embedding)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    @torch.inference_mode()
    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        rows: Tensor = self._output_tensor()
        return (rows if tokens is None else rows[tokens.cpu()]).to(self.device, self.dtype)

    @torch.inference_mode()
    def forward(
        self, segments: Sequence[Segment], hidden: Sequence[str | int] = (), skip: Sublayers = FULL
    ) -> list[SegmentOutput]:
        check_request(segments, hidden, self.num_layers, skip)
        rows, turns, tokens = self._prepare(segments)
        x = self.embed(tokens)
        kept: dict[str | int, Tensor] = {}
        delta: Tensor | None = None  # the last sub-block's output, added to x together with the next norm
        for index, block in enumerate(self.blocks):
            if index in hidden:
                x, delta = x if delta is None else x + delta, None
                kept[index] = x
            if 2 * index not in skip:
                x, normed = self.operations.add_norm(x, delta, block.input_norm)
                delta = self._attention(block, index, normed, rows, turns[block.is_sliding])
            if 2 * index + 1 not in skip:
                x, normed = self.operations.add_norm(x, delta, block.mlp_norm)
                delta = self._mlp(block, normed)
        x = x if delta is None else x + delta
        for part in rows:
            part.cache.add_scratch(part.positions)
        return self._outputs(segments, rows, x, kept, FINAL_HIDDEN in hidden)

    # -- phases of a forward pass --------------------------------------------------------------------------

    def _prepare(self, segments: Sequence[Segment]) -> tuple[list[_Rows], dict[bool, Tensor], Tensor]:
        rows: list[_Rows] = []
        tokens: list[int] = []
        for segment in segments:
            cache = segment.cache
            if not isinstance(cache, KVCache):
                raise TypeError(f"{self.name} needs its own KVCache, got {type(cache).__name__}")
            cache.reserve(len(segment.tokens))
            offsets = [cache.length + cache.scratch - group.base for group in cache.groups]
            biases = [attention_bias(segment, group, self.plan.dtype, self.device) for group in cache.groups]
            stop = len(tokens) + len(segment.tokens)
            rows.append(_Rows(cache, len(tokens), stop, segment.resolved_positions(), offsets, biases))
            tokens.extend(segment.tokens)
        positions = [position for part in rows for position in part.positions]
        index = torch.tensor(positions, device=self.device)
        highest = max(positions)
        kinds = {block.is_sliding for block in self.blocks}
        turns = {kind: self._ropes[kind].turns(index, highest) for kind in kinds}
        return rows, turns, torch.tensor(tokens, device=self.device)

    def _attention(self, block: Block, index: int, normed: Tensor, rows: list[_Rows], turns: Tensor) -> Tensor:
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = block.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
        if block.q_norm is not None and block.k_norm is not None:
            queries = F.rms_norm(qkv[:, :heads], (head_dim,), block.q_norm, config.norm_eps)
            keys = F.rms_norm(qkv[:, heads : heads + kv_heads], (head_dim,), block.k_norm, config.norm_eps)
            qkv = torch.cat([queries, keys, qkv[:, heads + kv_heads :]], dim=1)
        places = []
        for part in rows:
            group, place = part.cache.place[index]
            entries = part.cache.groups[group].blocks[place]
            places.append(Place(part.start, part.stop, entries, part.offsets[group], part.biases[group]))
        out = block.out(self.operations.attention_of_all(qkv, turns, places))
        if block.after_attention_norm is not None:
            out = F.rms_norm(out, (config.hidden_size,), block.after_attention_norm, config.norm_eps)
        return out

    def _mlp(self, block: Block, normed: Tensor) -> Tensor:
        config = self.config
        out = block.down(self.operations.gate(block.gate_up(normed)))
        if block.after_mlp_norm is not None:
            out = F.rms_norm(out, (config.hidden_size,), block.after_mlp_norm, config.norm_eps)
        return out

    def _outputs(
        self,
        segments: Sequence[Segment],
        rows: list[_Rows],
        x: Tensor,
        kept: dict[str | int, Tensor],
        wants_final: bool,
    ) -> list[SegmentOutput]:
        config = self.config
        wanted: list[int] = []
        counts: list[int] = []
        for segment, part in zip(segments, rows, strict=True):
            local = range(part.stop - part.start) if segment.logit_rows is None else segment.logit_rows
            wanted.extend(part.start + row for row in local)
            counts.append(len(local))
        if wants_final:
            _, x = self.operations.add_norm(x, None, self.final_norm)
            kept[FINAL_HIDDEN] = x
        if wanted != list(range(x.shape[0])):
            x = x[torch.tensor(wanted, dtype=torch.long, device=self.device)]
        if not wants_final:
            _, x = self.operations.add_norm(x, None, self.final_norm)
        logits = self.head(x) if wanted else x.new_empty((0, config.vocab_size))
        if config.final_soft_cap is not None:
            logits = torch.tanh(logits / config.final_soft_cap) * config.final_soft_cap
        return [
            SegmentOutput(part_logits, {name: state[part.start : part.stop] for name, state in kept.items()})
            for part_logits, part in zip(torch.split(logits, counts), rows, strict=True)
        ]


def load_block(loader: WeightLoader, config: DecoderConfig, index: int) -> Block:
    """Block ``index`` under transformers' tensor names, q and k rows in interleaved rotary order."""
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    q_order = interleaved_rows(config.num_heads, config.head_dim)
    k_order = interleaved_rows(config.num_kv_heads, config.head_dim)
    head_order = interleaved_rows(1, config.head_dim)
    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"

    def norm(name: str, order: Tensor | None = None) -> Tensor:
        return loader.vector(f"{name}.weight", config.norm_offset, order)

    return Block(
        input_norm=norm(f"{prefix}.input_layernorm"),
        qkv=loader.linear(
            [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"],
            [q_order, k_order, None],
            bias=config.qkv_bias,
        ),
        q_norm=norm(f"{attention}.q_norm", head_order) if config.qk_norm else None,
        k_norm=norm(f"{attention}.k_norm", head_order) if config.qk_norm else None,
        out=loader.linear([f"{attention}.o_proj"], bias=config.output_bias),
        after_attention_norm=norm(f"{prefix}.post_attention_layernorm") if config.post_norms else None,
        mlp_norm=norm(f"{prefix}.{mlp_norm}"),
        gate_up=loader.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], bias=config.mlp_bias),
        down=loader.linear([f"{mlp}.down_proj"], bias=config.mlp_bias),
        after_mlp_norm=norm(f"{prefix}.post_feedforward_layernorm") if config.post_norms else None,
        is_sliding=config.windows[index] is not None,
    )
