"""The EAGLE-3 network: public names, the four variants' flags, parity with a plain implementation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.tiny_heads import tiny_head, unrolled
from outrider.heads.build import three_layers

PUBLIC = {
    "fc.weight": (12, 36),
    "midlayer.input_layernorm.weight": (12,),
    "midlayer.hidden_norm.weight": (12,),
    "midlayer.self_attn.q_proj.weight": (24, 24),
    "midlayer.self_attn.k_proj.weight": (12, 24),
    "midlayer.self_attn.v_proj.weight": (12, 24),
    "midlayer.self_attn.o_proj.weight": (12, 24),
    "midlayer.post_attention_layernorm.weight": (12,),
    "midlayer.mlp.gate_proj.weight": (16, 12),
    "midlayer.mlp.up_proj.weight": (16, 12),
    "midlayer.mlp.down_proj.weight": (12, 16),
    "norm.weight": (12,),
    "lm_head.weight": (20, 12),
}
FC_NORMS = {f"fc_norm.{i}.weight": (12,) for i in range(3)}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.mark.parametrize(
    ("flag", "more"), [(None, {}), *zip(FLAGS, ({}, {"input_norm.weight": (36,)}, FC_NORMS, {}), strict=True)]
)
def test_names_are_those_of_public_files(flag: str | None, more: dict[str, tuple[int, ...]]) -> None:
    network = tiny_head("eagle3", **({} if flag is None else {flag: True}))
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert shapes == PUBLIC | more
    assert network.expected() == shapes
    assert not network.needs_target_rows


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def only_itself(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of a row that sees nothing but itself: its value, once for each of the group's queries."""
    return values.view(-1, 2, 1, 6).expand(-1, 2, 2, 6).reshape(len(values), 24)


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_two_steps_written_out(flag: str | None) -> None:
    """Features in the configured order, the embedding first, and what each flag changes."""
    network = tiny_head("eagle3", **({} if flag is None else {flag: True}))
    w = {name.removeprefix("midlayer."): tensor for name, tensor in network.state_dict().items()}
    generator = torch.Generator().manual_seed(2)
    features = {name: torch.randn((3, 12), generator=generator) for name in (5, 1, 2)}
    tokens = torch.randn((2, 3, 12), generator=generator)
    parts = [features[name] for name in (1, 2, 5)]
    if flag == "fc_norm":
        parts = [rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
    joined = torch.cat(parts, dim=-1)
    if flag == "norm_before_fc":
        joined = rms(joined, w["input_norm.weight"])
    g = joined @ w["fc.weight"].T
    torch.testing.assert_close(network.fuse(features), g, atol=1e-5, rtol=1e-5)
    state = network.fuse(features)
    for token in tokens:
        normed = rms(g, w["hidden_norm.weight"])
        both = torch.cat([rms(token, w["input_layernorm.weight"]), normed], dim=-1)
        value = both @ w["self_attn.v_proj.weight"].T
        x = (normed if flag == "norm_before_residual" else g) + only_itself(value, value, value) @ w[
            "self_attn.o_proj.weight"
        ].T
        n = rms(x, w["post_attention_layernorm.weight"])
        gated = F.silu(n @ w["mlp.gate_proj.weight"].T) * (n @ w["mlp.up_proj.weight"].T)
        u = x + gated @ w["mlp.down_proj.weight"].T
        found = network.step(token=token, state=state, attend=only_itself)
        torch.testing.assert_close(found, u, atol=1e-4, rtol=1e-4)
        logits = rms(u, w["norm.weight"]) @ w["lm_head.weight"].T
        torch.testing.assert_close(network.logits(found), logits, atol=1e-4, rtol=1e-4)
        g = rms(u, w["norm.weight"]) if flag == "norm_output" else u
        state = network.recur(found)


def test_every_flag_changes_the_output() -> None:
    """heads.md section 4, item 12: a flag that is not passed on would leave the numbers as they were."""
    table = torch.randn((12, 12), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    features = {name: torch.randn((5, 12), generator=generator) for name in (1, 2, 5)}
    outputs = [
        unrolled(tiny_head("eagle3", **fields), table, features, 2)[1] for fields in ({}, *({f: True} for f in FLAGS))
    ]
    for i, one in enumerate(outputs):
        assert all((one - other).abs().max() > 1e-3 for other in outputs[:i])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(30, (2, 15, 27)), (32, (2, 16, 29)), (80, (2, 40, 77)), (4, (2, 1)), (2, (1, 0)), (1, (0,))],
)
def test_layers_are_the_originals_and_in_range_for_small_models(layers: int, expected: tuple[int, ...]) -> None:
    assert three_layers(layers) == expected
