"""Layer numbers: a table in which every hidden state is a spike of its own, captured as each engine captures."""

from __future__ import annotations

import pytest

from outrider.errors import IllegalCombinationError, ModelFileError
from outrider.heads.formats.dialect import Dialect, from_features, to_features

LAYERS = 8


def spike(block: int) -> list[int]:
    """The residual stream in front of ``block``: 1 at that place."""
    return [int(index == block) for index in range(LAYERS + 1)]


def run_blocks() -> list[tuple[list[int], list[int]]]:
    """Input and output of every block, in order."""
    return [(spike(block), spike(block + 1)) for block in range(LAYERS)]


def captured_by_vllm(ids: list[int]) -> list[list[int]]:
    """States in front of the blocks that are named."""
    return [state for number, (state, _) in enumerate(run_blocks()) if number in ids]


def captured_by_sglang(ids: list[int]) -> list[list[int]]:
    """States behind the blocks that are named."""
    return [state for number, (_, state) in enumerate(run_blocks()) if number in ids]


def test_all_dialects_name_the_same_states() -> None:
    features = (2, 4, 5)
    ours = [spike(block) for block in features]
    assert captured_by_vllm(from_features(features, Dialect.VLLM)) == ours
    assert captured_by_sglang(from_features(features, Dialect.SGLANG)) == ours
    assert captured_by_sglang(from_features(features, Dialect.VLLM)) != ours


@pytest.mark.parametrize("dialect", Dialect)
def test_there_and_back(dialect: Dialect) -> None:
    assert to_features(from_features((2, 15, 27), dialect), dialect, "x") == (2, 15, 27)


def test_the_default_ids_of_both() -> None:
    assert from_features((2, 15, 27), Dialect.VLLM) == [2, 15, 27]
    assert from_features((2, 15, 27), Dialect.SGLANG) == [1, 14, 26]


def test_states_without_a_number() -> None:
    with pytest.raises(IllegalCombinationError, match="hidden state 'final'"):
        from_features((2, "final"), Dialect.VLLM)
    with pytest.raises(IllegalCombinationError, match="hidden state '0', which sglang"):
        from_features((0, 2), Dialect.SGLANG)
    assert from_features((0, 2), Dialect.VLLM) == [0, 2]


@pytest.mark.parametrize("ids", [[1, 1, 2], [-2, 1]])
def test_impossible_ids(ids: list[int]) -> None:
    with pytest.raises(ModelFileError, match="must be different and not negative"):
        to_features(ids, Dialect.SGLANG, "head")
