"""AdamW with a schedule: its values, its state, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.errors import RunError
from outrider.training.optimizer import Optimizer, OptimizerSettings, autocast, scheduled


@pytest.mark.parametrize(
    ("progress", "factor"), [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.55, 0.6), (1.0, 0.2), (1.3, 0.2)]
)
def test_the_schedule(progress: float, factor: float) -> None:
    assert scheduled(progress, warmup=0.1, floor=0.2) == pytest.approx(factor)


def test_a_schedule_without_warmup_starts_at_the_top() -> None:
    assert scheduled(0.0, warmup=0.0, floor=0.1) == 1.0


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_one_update_is_adamw_with_the_gradient_clipped() -> None:
    module, settings = layer(), OptimizerSettings(0.1, warmup=0.0, weight_decay=0.5, clip=0.25)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = torch.tensor([[1.0, 2.0, 3.0]])
    norm = Optimizer(list(module.named_parameters()), settings).update(module(x).sum(), 0.0)
    assert norm == pytest.approx((2 * (1 + 4 + 9) + 2) ** 0.5)
    # The first step of Adam is the learning rate in each gradient's direction, after decay of the matrix.
    assert torch.allclose(module.weight, before["weight"] * (1 - 0.1 * 0.5) - 0.1, atol=1e-5)
    assert torch.allclose(module.bias, before["bias"] - 0.1, atol=1e-5)
    total = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
    assert total**0.5 == pytest.approx(0.25, rel=1e-4)


def test_the_state_continues_exactly() -> None:
    def train(module: nn.Linear, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimizer.update(module(x).square().mean(), step / 10)

    whole, half = layer(), layer()
    settings = OptimizerSettings()
    train(whole, Optimizer(list(whole.named_parameters()), settings), range(10))
    first = Optimizer(list(half.named_parameters()), settings)
    train(half, first, range(4))
    kept, weights = first.state(), {n: p.detach().clone() for n, p in half.named_parameters()}
    again = layer()
    again.load_state_dict(weights)
    second = Optimizer(list(again.named_parameters()), settings)
    second.restore({name: tensor.clone() for name, tensor in kept.items()})
    train(again, second, range(4, 10))
    assert torch.equal(again.weight, whole.weight)
    assert torch.equal(again.bias, whole.bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_divergence_is_an_error_and_changes_nothing(value: float) -> None:
    module = layer()
    before = module.weight.detach().clone()
    optimizer = Optimizer(list(module.named_parameters()), OptimizerSettings())
    with pytest.raises(RunError, match=r"diverged; use a lower --lr"):
        optimizer.update(module(torch.ones(1, 3)).sum() * value, 0.5)
    assert torch.equal(module.weight, before)


def test_products_in_bfloat16_masters_in_float32() -> None:
    module = layer()
    with autocast(torch.bfloat16, torch.device("cpu")):
        out = module(torch.ones(1, 3))
    assert out.dtype is torch.bfloat16
    Optimizer(list(module.named_parameters()), OptimizerSettings()).update(out.float().sum(), 0.5)
    assert module.weight.dtype is torch.float32
    with autocast(torch.float32, torch.device("cpu")):
        assert module(torch.ones(1, 3)).dtype is torch.float32
