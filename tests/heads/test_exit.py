"""The early exit's network: names, parity, what it starts from, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from outrider.errors import ModelFileError
from outrider.heads.build import exit_block, new_config, untrained_head
from outrider.heads.exit import EarlyExit, ExitConfig
from outrider.heads.file import load_head, save_head
from outrider.models.toy import ToyModel


def exit_head(**fields: object) -> EarlyExit:
    """Random numbers everywhere, the norms included."""
    values = {
        "method": "layer_skip", "hidden_size": 6, "vocab_size": 20, "draft_vocab_size": 20, "features": (2,),
        "intermediate_size": 10, "norm_eps": 1e-5,
    }  # fmt: skip
    network = EarlyExit(ExitConfig.model_validate(values | fields))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return network.eval().requires_grad_(False)


def test_names_are_those_of_the_specification() -> None:
    network = exit_head()
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == network.expected()
    assert network.block == 2
    assert network.spec.first_label == 1


def test_parity_with_a_plain_implementation() -> None:
    network, x, rows = exit_head(), torch.randn(3, 4, 6), torch.randn(20, 6)
    w = {name.removesuffix(".weight"): tensor for name, tensor in network.state_dict().items()}
    network.bind(rows)
    n = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w["input_layernorm"]
    y = x + (F.silu(n @ w["mlp.gate_proj"].T) * (n @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    expected = (y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w["norm"]) @ rows.T
    torch.testing.assert_close(network({2: x, "final": torch.zeros(1)}), expected, rtol=1e-4, atol=1e-4)


def test_it_starts_as_the_plain_exit_behind_the_targets_final_norm() -> None:
    network, x, rows, norm = exit_head(), torch.randn(4, 6), torch.randn(20, 6), torch.rand(6)
    network.initialise(3)
    network.adopt_final_norm(norm)
    network.bind(rows)
    torch.testing.assert_close(network({2: x}), F.rms_norm(x, (6,), norm, 1e-5) @ rows.T)
    assert network.state_dict()["mlp.gate_proj.weight"].std() > 0


def test_where_it_leaves() -> None:
    """A block that every model with two or more has, and one that ``train collect`` keeps for EAGLE-3."""
    assert [exit_block(count) for count in (1, 2, 3, 4, 30)] == [1, 1, 2, 2, 2]
    assert new_config("layer_skip", ToyModel(vocab_size=9)).features == (2,)
    assert untrained_head("layer_skip", ToyModel(vocab_size=9), features=(3,)).config.features == (3,)


@pytest.mark.parametrize("features", [(), (1, 2), ("final",), (0,)])
def test_any_other_hidden_states_are_refused(features: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="features"):
        exit_head(features=features)


def test_the_file_keeps_it_and_is_strict(tmp_path: Path) -> None:
    network = exit_head(draft_vocab_size=4)
    network.draft_ids = torch.tensor([0, 7, 8, 19])
    path = tmp_path / "exit.safetensors"
    save_head(path, network, dtype=torch.float32)
    again = load_head(path, "layer_skip")
    assert again.config == network.config
    assert again.draft_ids is not None
    assert again.draft_ids.tolist() == [0, 7, 8, 19]
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in network.state_dict().items())
    with pytest.raises(ModelFileError, match="is a head for --drafter layer_skip, not mtp"):
        load_head(path, "mtp")
