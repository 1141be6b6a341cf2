"""Sequoia's name for ``multi_step``: the same verdicts, and no other proposals."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine
from outrider.errors import IllegalCombinationError
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind

WOR = ProposalKind.WITHOUT_REPLACEMENT


def test_it_is_multi_step() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)
    named, general = (
        build_engine("small_model", "widths:3,2", WOR, name).generate([1, 2], params) for name in ("swor", "multi_step")
    )
    assert named.tokens == general.tokens
    assert named.stats.num_accepted_tokens > 5


@pytest.mark.parametrize("kind", [ProposalKind.IID, ProposalKind.DETERMINISTIC])
def test_other_proposals_are_refused(kind: ProposalKind) -> None:
    with pytest.raises(IllegalCombinationError, match=f"'swor' is not exact for {kind.value}.*multi_step"):
        build_engine("small_model", "widths:3,2", kind, "swor")
