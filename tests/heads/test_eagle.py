"""The EAGLE-1/2 network: public names, order of inputs, which norms exist, parity with a plain implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from heads.tiny_heads import tiny_head, unrolled
from outrider.errors import ModelFileError
from outrider.heads.eagle import Eagle, EagleConfig
from outrider.heads.file import load_head, save_head

PUBLIC = {
    "fc.weight": (12, 24),
    "layers.0.self_attn.q_proj.weight": (24, 12),
    "layers.0.self_attn.k_proj.weight": (12, 12),
    "layers.0.self_attn.v_proj.weight": (12, 12),
    "layers.0.self_attn.o_proj.weight": (12, 24),
    "layers.0.mlp.gate_proj.weight": (16, 12),
    "layers.0.mlp.up_proj.weight": (16, 12),
    "layers.0.mlp.down_proj.weight": (12, 16),
    "layers.0.post_attention_layernorm.weight": (12,),
}
QKV_BIASES = {f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in (("q", 24), ("k", 12), ("v", 12))}
NORMS = {"embedding_layernorm.weight": (12,), "hidden_states_layernorm.weight": (12,)}


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, {}),
        ({"fc_bias": True}, {"fc.bias": (12,)}),
        ({"qkv_bias": True}, QKV_BIASES),
        ({"para_norm": True}, NORMS),
        ({"fc_bias": True, "qkv_bias": True, "para_norm": True}, {"fc.bias": (12,)} | QKV_BIASES | NORMS),
    ],
)
def test_names_are_those_of_public_files(fields: dict[str, bool], more: dict[str, tuple[int, ...]]) -> None:
    """No input_layernorm, no final norm, no output matrix, no embedding."""
    network = tiny_head("eagle", **fields)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert shapes == PUBLIC | more
    assert network.expected() == shapes
    assert network.needs_target_rows


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def only_itself(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of a row that sees nothing but itself: its value, once for each of the group's queries."""
    return values.view(-1, 2, 1, 6).expand(-1, 2, 2, 6).reshape(len(values), 24)


@pytest.mark.parametrize("flags", [{}, {"fc_bias": True, "qkv_bias": True}, {"para_norm": True}])
def test_one_step_written_out(flags: dict[str, bool]) -> None:
    """The embedding comes first; the residual is ``fc``'s output, not normed in front of the attention."""
    network = tiny_head("eagle", **flags)
    w = {name.removeprefix("layers.0."): tensor for name, tensor in network.state_dict().items()}
    token, state = torch.randn((2, 3, 12), generator=torch.Generator().manual_seed(2))
    e, h = token, state
    if "para_norm" in flags:
        e, h = rms(token, w["embedding_layernorm.weight"]), rms(state, w["hidden_states_layernorm.weight"])
    z = e @ w["fc.weight"][:, :12].T + h @ w["fc.weight"][:, 12:].T + w.get("fc.bias", torch.tensor(0.0))
    value = z @ w["self_attn.v_proj.weight"].T + w.get("self_attn.v_proj.bias", torch.tensor(0.0))
    x = z + only_itself(z, z, value) @ w["self_attn.o_proj.weight"].T
    n = rms(x, w["post_attention_layernorm.weight"])
    expected = (
        x + (F.silu(n @ w["mlp.gate_proj.weight"].T) * (n @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    )
    found = network.step(token=token, state=state, attend=only_itself)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert network.recur(found) is found
    rows = torch.randn((20, 12))
    network.bind(rows)
    torch.testing.assert_close(network.logits(found), found @ rows.T)


def test_queries_and_keys_have_their_biases() -> None:
    """The step above cannot tell: its rows see themselves alone."""
    seen: list[tuple[Tensor, Tensor]] = []

    def recording(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen.append((queries, keys))
        return queries

    network = tiny_head("eagle", qkv_bias=True)
    w = network.state_dict()
    token, state = torch.randn((2, 3, 12), generator=torch.Generator().manual_seed(2))
    network.step(token=token, state=state, attend=recording)
    z = torch.cat([token, state], dim=-1) @ w["fc.weight"].T
    for found, name in zip(seen[0], "qk", strict=True):
        prefix = f"layers.0.self_attn.{name}_proj"
        torch.testing.assert_close(found, z @ w[f"{prefix}.weight"].T + w[f"{prefix}.bias"])


def test_pairs_and_steps_read_what_they_should() -> None:
    """Step i of row t reads tokens up to t + 1 + i and features up to t, and nothing else."""
    network = tiny_head("eagle").double()
    table = torch.randn((12, 12), generator=torch.Generator().manual_seed(1)).double()
    features = torch.randn((6, 12), generator=torch.Generator().manual_seed(2)).double()
    before = unrolled(network, table, {"final": features}, 3)
    reads: list[tuple[str, int, Callable[[int], int]]] = [("token", 5, lambda i: 4 - i), ("feature", 3, lambda i: 3)]
    for what, index, first_row in reads:
        changed, states = table.clone(), features.clone()
        (changed if what == "token" else states)[index] += 1.0
        after = unrolled(network, changed, {"final": states}, 3)
        for step in range(3):
            is_same = [bool(torch.equal(one, other)) for one, other in zip(before[step], after[step], strict=True)]
            # A later step's own keys are those of its row: token 5 reaches no row that did not read it itself.
            assert is_same == [row < max(0, first_row(step)) for row in range(6)], (what, step)


def test_several_features_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1 item"):
        tiny_head("eagle", features=(1, "final"))


def test_unknown_flags_are_errors() -> None:
    with pytest.raises(ValidationError, match="norm_output"):
        tiny_head("eagle", norm_output=True)


def test_initial_numbers_depend_on_the_seed_alone() -> None:
    first, second, other = (Eagle(EagleConfig(**tiny_head("eagle", fc_bias=True).config.model_dump())) for _ in "abc")
    for network, seed in ((first, 1), (second, 1), (other, 2)):
        network.initialise(seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert bool((first.fc.bias == 0).all())
    assert float(first.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert bool((first.layers[0].post_attention_layernorm.weight == 1).all())


def test_file_round_trip_and_a_flag_that_the_tensors_contradict(tmp_path: Path) -> None:
    network = tiny_head("eagle", fc_bias=True, para_norm=True, qkv_bias=True)
    save_head(tmp_path / "head", network, dtype=torch.float32)
    back = load_head(tmp_path / "head", "eagle")
    assert back.config == network.config
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), back.parameters(), strict=True))
    network.config = network.config.model_copy(update={"fc_bias": False})
    save_head(tmp_path / "wrong", network)
    with pytest.raises(ModelFileError, match=r"unknown tensor 'fc\.bias'"):
        load_head(tmp_path / "wrong", "eagle")
