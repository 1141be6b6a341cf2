"""EAGLE-3: three target layers fused, one decoder layer over token and state, a reduced draft vocabulary.

Li et al. 2025 (arXiv 2503.01840). The layer's attention reads the norm of the token's embedding beside the norm of the
state (2 H inputs); the state is the residual. The output, before the final norm, is the next step's state, without a
feature loss: training unrolls the steps (training-time test). EAGLE-3.1 (arXiv 2605.09992) adds a norm before ``fc``
for each layer (``fc_norm``) and feeds the normed output back (``norm_output``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.heads.config import AttentionConfig, Feature, HeadConfig
from outrider.heads.network import Attend, Mlp, RecurrentNetwork, RMSNorm, SelfAttention, start_plainly
from outrider.heads.spec import HeadSpec, Input, TensorSpec


class Eagle3Config(AttentionConfig):
    """Flags of EAGLE-3 variants.

    Attributes:
        norm_before_residual: the residual is the normed state (speculators), not the state itself (original).
        norm_before_fc: one norm over all three features together, before ``fc``.
        fc_norm: a norm for each feature, before ``fc`` (EAGLE-3.1).
        norm_output: the next step reads the normed output (EAGLE-3.1).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


LAYER = "midlayer"

SPEC = HeadSpec(
    method="eagle3",
    inputs=(Input("features", "feature", 0), Input("token", "token", 1), Input("state", "state", 0)),
    first_label=2,
    is_recurrent=True,
    tensors=(
        TensorSpec("fc.weight", ("H", "features*H")),
        TensorSpec("input_norm.weight", ("features*H",), when="norm_before_fc"),
        TensorSpec("fc_norm.{features}.weight", ("H",), when="fc_norm"),
        TensorSpec(f"{LAYER}.input_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.hidden_norm.weight", ("H",)),
        TensorSpec(f"{LAYER}.self_attn.q_proj.weight", ("Q", "2*H")),
        TensorSpec(f"{LAYER}.self_attn.k_proj.weight", ("KV", "2*H")),
        TensorSpec(f"{LAYER}.self_attn.v_proj.weight", ("KV", "2*H")),
        TensorSpec(f"{LAYER}.self_attn.o_proj.weight", ("H", "Q")),
        TensorSpec(f"{LAYER}.post_attention_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.mlp.gate_proj.weight", ("I", "H")),
        TensorSpec(f"{LAYER}.mlp.up_proj.weight", ("I", "H")),
        TensorSpec(f"{LAYER}.mlp.down_proj.weight", ("H", "I")),
        TensorSpec("norm.weight", ("H",)),
        TensorSpec("lm_head.weight", ("Vd", "H")),
    ),
)


class _Layer(nn.Module):
    """One decoder layer over (token, state)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = Mlp(size, config.intermediate_size)

    def forward(self, token: Tensor, state: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        both = torch.cat([self.input_layernorm(token), normed], dim=-1)
        x: Tensor = residual + self.self_attn(both, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3(RecurrentNetwork):
    """See the module's docstring."""

    spec: ClassVar[HeadSpec] = SPEC
    Config: ClassVar[type[HeadConfig]] = Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.flags = config
        size, count = config.hidden_size, len(config.features)
        self.fc = nn.Linear(count * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(count * size, config.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, config.norm_eps) for _ in range(count))
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(size, config.norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    @property
    def needs_target_rows(self) -> bool:
        return False

    def fuse(self, features: Mapping[Feature, Tensor]) -> Tensor:
        parts = [features[name] for name in self.config.features]
        if self.flags.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        joined = torch.cat(parts, dim=-1)
        if self.flags.norm_before_fc:
            joined = self.input_norm(joined)
        state: Tensor = self.fc(joined)
        return state

    def step(self, *, token: Tensor, state: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.midlayer(token, state, attend)
        return out

    def logits(self, output: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(output))
        return logits

    def recur(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.flags.norm_output else output

    def initialise(self, seed: int) -> None:
        """Norms 1, products small and normal; the state starts as the last feature, and the layer adds little to it.

        Training from there was ahead of a plain normal start after 80,000 tokens (docs/log.md). The objective copies
        the target's rows into ``lm_head``.
        """
        start_plainly(self, seed)
        size = self.config.hidden_size
        with torch.no_grad():
            for quiet in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj, self.fc):
                quiet.weight.mul_(0.1)
            self.fc.weight[:, -size:] += torch.eye(size)
