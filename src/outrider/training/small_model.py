"""A Llama that can be trained, under transformers' tensor names, and how a small one starts out.

It is the student of ``train small-model`` and, at the target's own sizes, the backbone of ``train medusa2``. The
mathematics is that of ``models/decoder.py`` (checked by a test), over packed rows that hold several documents instead
of a cache. Knows nothing of losses and of text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import InvalidOptionError, UnsupportedModelError
from outrider.heads.config import AttentionConfig, Size
from outrider.heads.network import Mlp, RMSNorm, SelfAttention, normal_
from outrider.heads.rotary import Rotary
from outrider.models.base import FINAL_HIDDEN
from outrider.models.checkpoint import Checkpoint
from outrider.models.config import DecoderConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LlamaConfig(AttentionConfig):
    """Sizes of a whole Llama.

    Attributes:
        num_layers: blocks.
        tie_embeddings: whether the output matrix is the embedding.
    """

    num_layers: Size
    tie_embeddings: bool = True


def small_config(
    vocab_size: int, *, hidden: int, layers: int, heads: int, intermediate: int, context: int
) -> LlamaConfig:
    """A small model for a target's vocabulary: the sizes given, tied embeddings, plain rotary embedding.

    Raises:
        InvalidOptionError: for heads that do not share ``hidden`` evenly, in even widths.
    """
    if hidden % heads or hidden // heads % 2:
        raise InvalidOptionError(
            f"--hidden {hidden} cannot be shared by --heads {heads}: each needs the same even number; 64 is usual"
        )
    return LlamaConfig(
        method="small_model",
        hidden_size=hidden,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        features=(FINAL_HIDDEN,),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=intermediate,
        context_length=context,
    )


def llama_config(config: DecoderConfig) -> LlamaConfig:
    """The sizes of an existing Llama.

    Raises:
        UnsupportedModelError: for a family, or a feature, that the trainable module does not have.
    """
    has_factors = config.rope_full.scaling.get("rope_type") == "llama3_factors"  # has no form in a config.json
    if config.family != "llama" or config.qkv_bias or config.output_bias or config.mlp_bias or has_factors:
        raise UnsupportedModelError(
            "only Llama models without biases can be trained further here, and this one is not one of them "
            f"('{config.family}'); train a head, which leaves the target as it is"
        )
    return LlamaConfig(
        method="llama",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        features=(FINAL_HIDDEN,),
        num_layers=config.num_layers,
        tie_embeddings=config.tie_embeddings,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_full.theta,
        rope_scaling=config.rope_full.scaling,
        context_length=config.context_length,
    )


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, attend: PackedAttention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class TrainableLlama(nn.Module):
    """``state_dict`` keys are transformers' (``model.layers.0.self_attn.q_proj.weight``); parameters are float32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states, after the norm.

        Args:
            tokens, documents, positions: int64 [B, T], as in ``training/batch.py``; rows see their own document only.

        Returns:
            [B, T, hidden_size].
        """
        x = self.model.embed_tokens(tokens)
        attend = PackedAttention(self.config, documents, positions)
        for layer in self.model.layers:
            x = layer(x, attend)
        out: Tensor = self.model.norm(x)
        return out

    @property
    def output_matrix(self) -> Tensor:
        """[vocab_size, hidden_size]: products of final states with its rows are logits."""
        return self.model.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight


class PackedAttention:
    """Causal attention within each document of packed rows, with rotary embedding (``heads/network.py:Attend``)."""

    def __init__(self, config: AttentionConfig, documents: Tensor, positions: Tensor) -> None:
        self.config = config
        self._turns = Rotary(config, documents.device).at(positions, torch.float32)
        rows = torch.arange(documents.shape[1], device=documents.device)
        same = documents[:, :, None] == documents[:, None, :]
        # Padding rows see one another: a row that saw nothing would make NaN.
        self._visible = (same & (rows[:, None] >= rows[None, :]))[:, None]

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cos, sin = (turn.to(queries.dtype) for turn in self._turns)
        head_dim = self.config.head_dim
        q, k, v = (x.view(*x.shape[:-1], -1, head_dim) for x in (queries, keys, values))
        q, k = Rotary.turn(q, cos, sin), Rotary.turn(k, cos, sin)
        group = self.config.num_heads // self.config.num_kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._visible)
        return out.transpose(1, 2).flatten(-2)


def load_weights(module: TrainableLlama, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's tensors (dequantised) into ``module``, which must have its sizes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(checkpoint.tensor(name))


def principal_directions(rows: Tensor, count: int) -> Tensor:
    """The ``count`` orthonormal directions in which ``rows`` [n, H] vary most, [H, count], the strongest first."""
    centred = rows.double() - rows.double().mean(dim=0)
    vectors: Tensor = torch.linalg.eigh(centred.T @ centred).eigenvectors
    return vectors.flip(1)[:, :count].to(rows.dtype)


def start(module: TrainableLlama, target_rows: Tensor, frequent: Tensor, seed: int) -> None:
    """Set every parameter for the start of training.

    The embedding is the target's, projected on the principal directions of its frequent tokens' rows: tokens that the
    target takes for similar start out similar, and since the embedding is the output matrix as well, a final state
    equal to the target's in those directions would give nearly its logits. The mean of the rows is left out: it adds
    the same to all logits. Matrices start as small normal draws, those that write to the residual stream smaller
    with depth.

    Args:
        target_rows: the target's output rows [vocab_size, target hidden], float32.
        frequent: int64 [n], the tokens whose rows the directions are taken from.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    config = module.config
    directions = principal_directions(target_rows[frequent], config.hidden_size)
    with torch.no_grad():
        projected = (target_rows - target_rows[frequent].mean(dim=0)) @ directions
        rows = module.model.embed_tokens.weight
        normal_(rows, generator)  # what is left of it: directions that a narrower target does not have
        rows[:, : projected.shape[1]] = projected
        if not config.tie_embeddings:
            module.lm_head.weight.copy_(rows)
    for name, parameter in module.named_parameters():
        if name.endswith("proj.weight"):
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            normal_(
                parameter, generator, 0.02 / (2 * config.num_layers) ** 0.5 if writes else config.hidden_size**-0.5 / 2
            )
