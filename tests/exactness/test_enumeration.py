"""The enumerating stream itself, on laws that can be written down."""

from __future__ import annotations

import pytest
import torch

from outrider.audit.enumeration import EnumeratingStream, outcomes, output_law
from outrider.sampling.draw import Role


def test_two_dependent_draws() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def step(stream: EnumeratingStream) -> tuple[int, bool]:
        token = stream.categorical(p, 0, Role.TARGET, 0)
        return token, stream.bernoulli(0.25 * token, 0, Role.ACCEPT, 0)

    law = output_law(step)
    expected = {(0, False): 0.5, (1, False): 0.225, (1, True): 0.075, (2, False): 0.1, (2, True): 0.1}
    assert law == pytest.approx(expected)


def test_certain_outcomes_cost_no_branch() -> None:
    one_hot = torch.tensor([0.0, 1.0, 0.0])

    def step(stream: EnumeratingStream) -> tuple[int, bool, bool]:
        draws = stream.bernoulli(1.0, 0, Role.ACCEPT, 0), stream.bernoulli(-1.0, 0, Role.ACCEPT, 1)
        return stream.categorical(one_hot, 0, Role.TARGET, 0), *draws

    assert list(outcomes(step)) == [((1, True, False), 1.0)]


def test_weights_need_not_be_normalised() -> None:
    law = output_law(lambda stream: stream.categorical(torch.tensor([1.0, 3.0]), 0, Role.DRAFT, 0))
    assert law == pytest.approx({0: 0.25, 1: 0.75})


def test_a_key_used_twice_is_an_error() -> None:
    def step(stream: EnumeratingStream) -> bool:
        return stream.bernoulli(0.5, 0, Role.ACCEPT, 0) and stream.bernoulli(0.5, 0, Role.ACCEPT, 0)

    with pytest.raises(ValueError, match="drawn from twice"):
        output_law(step)
