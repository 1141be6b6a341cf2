"""Multi-token prediction: one whole decoder layer over (token, last hidden state), unrolled, with the target's output.

DeepSeek-V3 (arXiv 2412.19437, section 2.2); one module shared by all steps as in FastMTP (arXiv 2509.18362). Tensor
names are those of speculators' ``mtp`` files. The output, after ``final_layernorm``, is both what the target's output
rows turn into logits and the next step's state, so a step stands in for the target's own last hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.heads.config import AttentionConfig, Feature, HeadConfig
from outrider.heads.network import Attend, Mlp, RecurrentNetwork, RMSNorm, SelfAttention, copy_, start_plainly
from outrider.heads.spec import HeadSpec, Input, TensorSpec


class MtpConfig(AttentionConfig):
    """An MTP head: ``features`` is the target's last hidden state, after its final norm."""

    features: tuple[Feature]


LAYER = "mtp_layers.0"

SPEC = HeadSpec(
    method="mtp",
    inputs=(Input("features", "feature", 0), Input("token", "token", 1), Input("state", "state", 0)),
    first_label=2,
    is_recurrent=True,
    tensors=(
        TensorSpec(f"{LAYER}.token_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.hidden_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.input_proj.weight", ("H", "2*H")),
        TensorSpec(f"{LAYER}.input_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.self_attn.q_proj.weight", ("Q", "H")),
        TensorSpec(f"{LAYER}.self_attn.k_proj.weight", ("KV", "H")),
        TensorSpec(f"{LAYER}.self_attn.v_proj.weight", ("KV", "H")),
        TensorSpec(f"{LAYER}.self_attn.o_proj.weight", ("H", "Q")),
        TensorSpec(f"{LAYER}.post_attention_layernorm.weight", ("H",)),
        TensorSpec(f"{LAYER}.mlp.gate_proj.weight", ("I", "H")),
        TensorSpec(f"{LAYER}.mlp.up_proj.weight", ("I", "H")),
        TensorSpec(f"{LAYER}.mlp.down_proj.weight", ("H", "I")),
        TensorSpec(f"{LAYER}.final_layernorm.weight", ("H",)),
    ),
)


class _Layer(nn.Module):
    """Token and state joined, then one decoder layer of the Llama family."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.token_layernorm = RMSNorm(size, eps)
        self.hidden_layernorm = RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(config, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = Mlp(size, config.intermediate_size)
        self.final_layernorm = RMSNorm(size, eps)

    def forward(self, *, token: Tensor, state: Tensor, attend: Attend) -> Tensor:
        both = torch.cat([self.token_layernorm(token), self.hidden_layernorm(state)], dim=-1)
        x: Tensor = self.input_proj(both)
        x = x + self.self_attn(self.input_layernorm(x), attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: Tensor = self.final_layernorm(x)
        return out


class Mtp(RecurrentNetwork):
    """See the module's docstring."""

    spec: ClassVar[HeadSpec] = SPEC
    Config: ClassVar[type[HeadConfig]] = MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self.mtp_layers = nn.ModuleList([_Layer(config)])

    def fuse(self, features: Mapping[Feature, Tensor]) -> Tensor:
        return features[self.config.features[0]]

    def step(self, *, token: Tensor, state: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.mtp_layers[0](token=token, state=state, attend=attend)
        return out

    def logits(self, output: Tensor) -> Tensor:
        return self.target_logits(output)

    def initialise(self, seed: int) -> None:
        """Norms 1, products normal with standard deviation 0.02."""
        start_plainly(self, seed)

    def adopt_final_norm(self, weight: Tensor) -> None:
        layer = self.mtp_layers[0]
        assert isinstance(layer, _Layer)
        copy_(layer.final_layernorm.weight, weight)
