"""An engine opens a trained head once, whatever regimes it serves; another engine has its own."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine
from outrider.types import Regime


@pytest.mark.parametrize(
    ("drafter", "attribute"),
    [
        ("eagle3:head=random", "head"),
        ("mtp:head=random", "head"),
        ("medusa:head=random", "network"),
        ("hydra:head=random", "network"),
        ("layer_skip:head=random", "exit"),
    ],
)
def test_both_regimes_draft_with_one_head(drafter: str, attribute: str) -> None:
    engine = build_engine(drafter)
    greedy, sampled = (getattr(engine.lane(regime).drafter, attribute) for regime in Regime)
    assert greedy is not None
    assert greedy is sampled
    assert getattr(build_engine(drafter).lane(Regime.GREEDY).drafter, attribute) is not greedy
