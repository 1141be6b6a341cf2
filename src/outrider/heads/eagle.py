"""EAGLE-1 and EAGLE-2: one decoder layer over (token, last hidden state) that predicts the next last hidden state.

Li et al. 2024 (arXiv 2401.15077; the dynamic tree of arXiv 2406.16858 uses the same weights). ``fc`` joins the token's
embedding, first, and the state; the layer has no norm in front of its attention and none behind its end, for its output
stands in for the target's own last hidden state: the target's output rows turn it into logits, and the next step reads
it. HASS (arXiv 2408.15766) puts a norm in front of each half of ``fc`` in one of its variants (``para_norm``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.heads.config import AttentionConfig, Feature, HeadConfig
from outrider.heads.network import Attend, Mlp, RecurrentNetwork, RMSNorm, SelfAttention, start_plainly
from outrider.heads.spec import HeadSpec, Input, TensorSpec


class EagleConfig(AttentionConfig):
    """Flags of EAGLE variants; ``features`` is one hidden state, the target's last after its final norm.

    Attributes:
        fc_bias: ``fc`` adds a bias (the first public heads; servers that read none drop it, so new heads go without).
        qkv_bias: queries, keys and values add one (heads for Qwen2).
        para_norm: norms in front of ``fc`` (HASS).
    """

    features: tuple[Feature]
    fc_bias: bool = False
    qkv_bias: bool = False
    para_norm: bool = False


LAYER = "layers.0"

SPEC = HeadSpec(
    method="eagle",
    inputs=(Input("features", "feature", 0), Input("token", "token", 1), Input("state", "state", 0)),
    first_label=2,
    is_recurrent=True,
    tensors=(
        TensorSpec("embedding_layernorm.weight", ("H",), when="para_norm"),
        TensorSpec("hidden_states_layernorm.weight", ("H",), when="para_norm"),
        TensorSpec("fc.weight", ("H", "2*H")),
        TensorSpec("fc.bias", ("H",), when="fc_bias"),
        TensorSpec(f"{LAYER}.self_attn.q_proj.weight", ("Q", "H")),
        TensorSpec(f"{LAYER}.self_attn.k_proj.weight", ("KV", "H")),
        TensorSpec(f"{LAYER}.self_attn.v_proj.weight", ("KV", "H")),
        TensorSpec(f"{LAYER}.self_attn.q_proj.bias", ("Q",), when="qkv_bias"),
        TensorSpec(f"{LAYER}.self_attn.k_proj.bias", ("KV",), when="qkv_bias"),
        TensorSpec(f"{LAYER}.self_attn.v_proj.bias", ("KV",), when="qkv_bias"),
        TensorSpec(f"{LAYER}.self_attn.o_proj.weight", ("H", "Q")),
        TensorSpec(f"{LAYER}.post_attention_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.mlp.gate_proj.weight", ("I", "H")),
        TensorSpec(f"{LAYER}.mlp.up_proj.weight", ("I", "H")),
        TensorSpec(f"{LAYER}.mlp.down_proj.weight", ("H", "I")),
    ),
)


class _Layer(nn.Module):
    """A decoder layer of the Llama family without its first norm."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, config.hidden_size, bias=config.qkv_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(x, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle(RecurrentNetwork):
    """See the module's docstring."""

    spec: ClassVar[HeadSpec] = SPEC
    Config: ClassVar[type[HeadConfig]] = EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.flags = config
        size = config.hidden_size
        if config.para_norm:
            self.embedding_layernorm = RMSNorm(size, config.norm_eps)
            self.hidden_states_layernorm = RMSNorm(size, config.norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList([_Layer(config)])

    def fuse(self, features: Mapping[Feature, Tensor]) -> Tensor:
        return features[self.config.features[0]]

    def step(self, *, token: Tensor, state: Tensor, attend: Attend) -> Tensor:
        if self.flags.para_norm:
            token, state = self.embedding_layernorm(token), self.hidden_states_layernorm(state)
        out: Tensor = self.layers[0](self.fc(torch.cat([token, state], dim=-1)), attend)
        return out

    def logits(self, output: Tensor) -> Tensor:
        return self.target_logits(output)

    def initialise(self, seed: int) -> None:
        """Norms 1, biases 0, products normal with standard deviation 0.02."""
        start_plainly(self, seed)
