"""Medusa's network: names as in the original files, sizes from flags, and the mathematics written out plainly."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from heads.tiny_heads import fill
from outrider.errors import ModelFileError
from outrider.heads.build import untrained_head
from outrider.heads.file import load_head, save_head
from outrider.heads.medusa import Medusa, MedusaConfig
from outrider.heads.spec import TensorSpec
from outrider.models.toy import ToyModel

SIZES = {"method": "medusa", "hidden_size": 6, "vocab_size": 20, "draft_vocab_size": 20}


def make(seed: int = 0, **fields: object) -> Medusa:
    network = Medusa(MedusaConfig.model_validate(SIZES | fields))
    fill(network, seed)  # type: ignore[arg-type]
    return network


def rows(size: int = 20) -> Tensor:
    return torch.randn((size, 6), generator=torch.Generator().manual_seed(9))


def plain_state(network: Medusa, head: int, x: Tensor) -> Tensor:
    tensors = network.state_dict()
    for block in range(network.config.blocks):
        weight, bias = tensors[f"{head}.{block}.linear.weight"], tensors[f"{head}.{block}.linear.bias"]
        inner = weight @ x + bias
        x = x + inner * torch.sigmoid(inner)
    return x


def test_names_of_the_original_files() -> None:
    """Two generations: with and without a matrix of each head's own (heads.md 2.1)."""
    shared = make(steps=2, blocks=1).expected()
    assert shared == {"0.0.linear.weight": (6, 6), "0.0.linear.bias": (6,), "1.0.linear.weight": (6, 6),
                      "1.0.linear.bias": (6,)}  # fmt: skip
    own = make(steps=1, blocks=2, own_output=True, draft_vocab_size=7).expected()
    assert own["0.2.weight"] == (7, 6)
    assert set(own) == {"0.0.linear.weight", "0.0.linear.bias", "0.1.linear.weight", "0.1.linear.bias", "0.2.weight"}


@pytest.mark.parametrize(("steps", "blocks", "own"), product((1, 3), (1, 2), (False, True)))
def test_the_module_holds_what_the_spec_says(steps: int, blocks: int, own: bool) -> None:
    network = make(steps=steps, blocks=blocks, own_output=own)
    assert {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()} == network.expected()
    assert network.needs_target_rows is not own


def test_counters_of_the_spec_language() -> None:
    sizes = {"steps": 2, "blocks": 3, "H": 4}
    assert list(TensorSpec("a.{steps}.{blocks:1}", ("H",)).expand(sizes, {})) == ["a.0.1", "a.0.2", "a.1.1", "a.1.2"]
    assert TensorSpec("{steps}.{=blocks}", ("(steps+2)*H",)).expand(sizes, {}) == {"0.3": (8,), "1.3": (12,)}
    assert TensorSpec("{blocks:1}", ("H",)).expand(sizes | {"blocks": 1}, {}) == {}


@pytest.mark.parametrize("own", [False, True])
def test_mathematics(own: bool) -> None:
    network = make(steps=3, blocks=2, own_output=own)
    matrix = rows()
    network.bind(None if own else matrix)
    feature = torch.randn((5, 6), generator=torch.Generator().manual_seed(1))
    together = network.all_logits(feature, 3)
    assert together.shape == (3, 5, 20)
    for head in range(3):
        used = network.state_dict()[f"{head}.2.weight"] if own else matrix
        for row in range(5):
            expected = used @ plain_state(network, head, feature[row])
            alone = network.logits(head, network.state(head, feature=feature[row]))
            torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(together[head, row], expected, atol=1e-4, rtol=1e-4)


def test_all_logits_stops_where_asked() -> None:
    network = make(steps=4)
    network.bind(rows())
    feature = torch.ones((1, 6))
    torch.testing.assert_close(network.all_logits(feature, 2), network.all_logits(feature, 4)[:2])


def test_blocks_are_untied() -> None:
    network = make(steps=1, blocks=2)
    assert not torch.equal(network.state_dict()["0.0.linear.weight"], network.state_dict()["0.1.linear.weight"])


def test_start_of_training() -> None:
    """W is 0, so a head begins as the feature plus a constant; heads differ; the seed decides."""
    target = ToyModel(vocab_size=20)
    first, again, other = (untrained_head("medusa", target, seed) for seed in (0, 0, 1))
    assert isinstance(first, Medusa)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert name.endswith("bias") or not tensor.any()
    assert not torch.equal(first.state_dict()["0.0.linear.bias"], other.state_dict()["0.0.linear.bias"])
    feature = torch.randn((2, 8), generator=torch.Generator().manual_seed(1))
    offset = F.silu(first.state_dict()["1.0.linear.bias"])
    torch.testing.assert_close(first.state(1, feature=feature), feature + offset)


def test_copy_target_rows() -> None:
    network = make(steps=2, own_output=True)
    network.copy_target_rows(rows())
    assert all(torch.equal(network.state_dict()[f"{head}.1.weight"], rows()) for head in range(2))
    shared = make(steps=2)
    before = {name: tensor.clone() for name, tensor in shared.state_dict().items()}
    shared.copy_target_rows(rows())
    assert all(torch.equal(tensor, before[name]) for name, tensor in shared.state_dict().items())


def test_without_rows_there_are_no_logits() -> None:
    network = make()
    with pytest.raises(ValueError, match="bind"):
        network.logits(0, torch.zeros(6))


@pytest.mark.parametrize("field", [{"features": (2,)}, {"features": ("final", "final")}, {"blocks": 0}, {"layers": 1}])
def test_refused_configurations(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MedusaConfig.model_validate(SIZES | field)


@pytest.mark.parametrize("own", [False, True])
def test_file_round_trip(tmp_path: Path, own: bool) -> None:
    ids = torch.tensor([1, 2, 5, 7, 8, 13, 19])
    network = make(steps=2, blocks=2, own_output=own, draft_vocab_size=7)
    network.draft_ids = ids
    save_head(tmp_path / "head.safetensors", network, dtype=torch.float32)
    read = load_head(tmp_path / "head.safetensors", "medusa")
    assert read.config == network.config
    assert read.draft_ids is not None
    assert read.draft_ids.tolist() == ids.tolist()
    assert all(torch.equal(tensor, network.state_dict()[name]) for name, tensor in read.state_dict().items())


def test_a_tied_or_missing_tensor_is_not_guessed(tmp_path: Path) -> None:
    """A file of two blocks read as one block would silently lose half of the head."""
    network = make(steps=1, blocks=2)
    network.config = network.config.model_copy(update={"blocks": 1})
    save_head(tmp_path / "head.safetensors", network)
    with pytest.raises(ModelFileError, match=r"unknown tensor '0\.1\.linear"):
        load_head(tmp_path / "head.safetensors")
