"""Hydra's network: each head reads the feature and every token since, and nothing else."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from heads.tiny_heads import fill
from outrider.heads.build import untrained_head
from outrider.heads.file import load_head, save_head
from outrider.heads.hydra import Hydra, HydraConfig
from outrider.models.toy import ToyModel

SIZES = {"method": "hydra", "hidden_size": 6, "vocab_size": 20, "draft_vocab_size": 20}


def make(seed: int = 0, **fields: object) -> Hydra:
    network = Hydra(HydraConfig.model_validate(SIZES | fields))
    fill(network, seed)  # type: ignore[arg-type]
    return network


def vectors(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def test_names_of_the_original_files() -> None:
    found = make(steps=2, blocks=2, own_output=True, output_bias=True).expected()
    assert found["hydra_mlp.0.0.linear.weight"] == (6, 12)
    assert found["hydra_mlp.1.0.res_connection.weight"] == (6, 18)
    assert found["hydra_mlp.1.1.linear.weight"] == (6, 6)
    assert found["hydra_lm_head.1.bias"] == (20,)
    assert "hydra_mlp.0.1.res_connection.weight" not in found
    assert not any("hydra_lm_head" in name for name in make(steps=2).expected())


@pytest.mark.parametrize(
    ("steps", "blocks", "output"),
    product((1, 3), (1, 3), ({}, {"own_output": True}, {"own_output": True, "output_bias": True})),
)
def test_the_module_holds_what_the_spec_says(steps: int, blocks: int, output: dict[str, bool]) -> None:
    network = make(steps=steps, blocks=blocks, **output)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == network.expected()


@pytest.mark.parametrize("own", [False, True])
def test_mathematics(own: bool) -> None:
    network = make(steps=3, blocks=2, own_output=own, output_bias=own)
    network.bind(None if own else vectors(20, 6))
    tensors = network.state_dict()
    feature, tokens = vectors(4, 6), list(vectors(3, 4, 6).unbind(0))
    for head in range(3):
        name = f"hydra_mlp.{head}"
        x = torch.cat([feature, *tokens[: head + 1]], dim=-1)
        inner = x @ tensors[f"{name}.0.linear.weight"].T + tensors[f"{name}.0.linear.bias"]
        residual = x @ tensors[f"{name}.0.res_connection.weight"].T + tensors[f"{name}.0.res_connection.bias"]
        state = residual + silu(inner)
        state = state + silu(state @ tensors[f"{name}.1.linear.weight"].T + tensors[f"{name}.1.linear.bias"])
        found = network.state(head, feature=feature, tokens=tokens[: head + 1])
        torch.testing.assert_close(found, state, atol=1e-4, rtol=1e-4)
        logits = state @ (tensors[f"hydra_lm_head.{head}.weight"] if own else vectors(20, 6)).T
        logits = logits + (tensors[f"hydra_lm_head.{head}.bias"] if own else 0.0)
        torch.testing.assert_close(network.logits(head, found), logits, atol=1e-4, rtol=1e-4)


def test_every_input_matters_and_the_order_too() -> None:
    network = make(steps=3)
    feature, tokens = vectors(6), list(vectors(3, 6).unbind(0))
    whole = network.state(2, feature=feature, tokens=tokens)
    assert not torch.allclose(whole, network.state(2, feature=feature + 1.0, tokens=tokens))
    for place in range(3):
        changed = [token + (1.0 if other == place else 0.0) for other, token in enumerate(tokens)]
        assert not torch.allclose(whole, network.state(2, feature=feature, tokens=changed))
    assert not torch.allclose(whole, network.state(2, feature=feature, tokens=tokens[::-1]))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_head_wants_its_own_number_of_tokens(count: int) -> None:
    with pytest.raises(ValueError, match="head 1 of Hydra reads 2 tokens"):
        make().state(1, feature=vectors(6), tokens=list(vectors(count, 6).unbind(0)))


def test_a_bias_needs_a_matrix() -> None:
    with pytest.raises(ValidationError, match="own_output"):
        HydraConfig.model_validate(SIZES | {"output_bias": True})


def test_start_of_training() -> None:
    """It begins as Medusa does: the feature and a constant, whatever the tokens; but tokens have a slope."""
    network = untrained_head("hydra", ToyModel(vocab_size=20))
    assert isinstance(network, Hydra)
    network.requires_grad_(True)
    feature, tokens = vectors(3, 8), list(vectors(2, 3, 8).unbind(0))
    state = network.state(1, feature=feature, tokens=tokens)
    offset = (state - feature).detach()
    torch.testing.assert_close(offset, offset[:1].expand(3, -1))
    state.sum().backward()
    for part in ("linear", "res_connection"):
        gradient = network.get_parameter(f"hydra_mlp.1.0.{part}.weight").grad
        assert gradient is not None
        assert bool(gradient[:, 8:].any())


def test_file_round_trip(tmp_path: Path) -> None:
    network = make(steps=2, blocks=2, own_output=True, output_bias=True, draft_vocab_size=3)
    network.draft_ids = torch.tensor([2, 9, 11])
    save_head(tmp_path / "head.safetensors", network, dtype=torch.float32)
    read = load_head(tmp_path / "head.safetensors", "hydra")
    assert read.config == network.config
    assert all(torch.equal(tensor, network.state_dict()[name]) for name, tensor in read.state_dict().items())
