"""The shape of a decoder, as one dataclass that every checkpoint format is read into."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. ``scaling`` is a Hugging Face ``rope_scaling`` dictionary, or empty."""

    theta: float = 10000.0
    scaling: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All that ``models/decoder.py`` needs to know; families differ only by these fields.

    ``windows[i]`` is block i's sliding window in positions (a row sees itself and ``window - 1`` before it), ``None``
    for full attention. ``ropes`` maps a block's window kind to its rotary embedding: ``full`` and ``sliding``.
    ``qk_scale`` multiplies q.k. ``norm_offset`` is added to stored norm weights (Gemma stores w - 1).
    """

    family: str  # llama | mistral | qwen2 | qwen3 | gemma2 | gemma3
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_full: RopeConfig
    rope_sliding: RopeConfig
    windows: tuple[int | None, ...]
    qk_scale: float
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma: norms after attention and feed-forward, before the residual sum
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"  # or gelu_tanh
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
