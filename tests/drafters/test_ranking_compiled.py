"""The compiled ranking against torch's: the same children of every row, whatever the rows hold, and who ranks which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.drafters import ranking
from outrider.sampling.params import SamplingParams
from outrider.trees.shapes.base import FloatArray, RankedChildren

compiled = pytest.importorskip("outrider.drafters.ranking_compiled")

WARM = SamplingParams(temperature=0.7)
FORBIDDEN = -torch.inf


def rows_of(rows: int, size: int, seed: int = 0) -> Tensor:
    """Logits of which many are equal: bfloat16 has 256 numbers from one power of two to the next."""
    return (3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))).bfloat16()


def by_torch(logits: Tensor, params: SamplingParams, k: int, least: FloatArray | None = None) -> RankedChildren:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "_compiled", lambda: None)
        return ranking.best_children(logits, params, k, least)


def check(logits: Tensor, params: SamplingParams, k: int, least: FloatArray | None = None) -> RankedChildren:
    """What both find, which is the same."""
    assert ranking._compiled() is compiled.best_of_rows
    found, expected = ranking.best_children(logits, params, k, least), by_torch(logits, params, k, least)
    assert found.owners.tolist() == expected.owners.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    # torch's own scores round where a cold request multiplies whole logits, so both are held against float64.
    scale = 1.0 / max(params.temperature, 1e-6) if params.temperature else 1.0
    exact = torch.softmax(logits.double() * scale, dim=-1)[found.owners, found.tokens]
    np.testing.assert_allclose(found.scores, exact, rtol=1e-4)
    assert [one.dtype for one in (found.owners, found.tokens, found.scores)] == [np.int64, np.int64, np.float64]
    return found


@pytest.mark.parametrize("size", [5, 100, 1000, 12288])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("k", [1, 4, 32])
def test_it_equals_torch(size: int, rows: int, k: int) -> None:
    logits = rows_of(rows, size, seed=size + rows)
    least = np.linspace(0.0, 0.13, rows + 1)[1:]
    for params in (SamplingParams(), WARM, SamplingParams(temperature=1e-30)):
        assert len(check(logits, params, k).owners) > 0
        assert len(check(logits, params, k, least).owners) <= rows * k
    everything = check(logits, SamplingParams(temperature=1.0), k)
    assert everything.owners.tolist() == np.repeat(np.arange(rows), min(k, size)).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=0.4, min_p=0.2),
        SamplingParams(temperature=1.2, top_k=5, top_p=0.5, min_p=0.05),
    ],
)
def test_what_sampling_parameters_exclude_is_left_out(params: SamplingParams) -> None:
    logits = rows_of(7, 1000)
    found = check(logits, params, 8)
    assert 7 <= len(found.owners) < len(check(logits, SamplingParams(temperature=params.temperature), 8).owners)


def test_least_leaves_out_only_what_scores_less() -> None:
    logits = rows_of(16, 1000)
    least = np.linspace(0.0, 0.5, 16)
    everything = check(logits, WARM, 8)
    some = check(logits, WARM, 8, least)
    wanted = everything.scores >= least[everything.owners]
    assert 0 < wanted.sum() < len(wanted)
    assert some.tokens.tolist() == everything.tokens[wanted].tolist()
    assert len(check(logits, WARM, 8, np.full(16, 1.1)).owners) == 0


def test_the_lowest_token_is_first_among_equals() -> None:
    """Also where the last place is contended, within a block of 64 and across blocks."""
    logits = torch.zeros(2, 200).bfloat16()
    logits[0, [150, 70, 199, 3]] = 2.0
    for k in (1, 2, 3, 4, 6):
        found = check(logits, WARM, k)
        assert found.tokens[found.owners == 0].tolist() == [3, 70, 150, 199, 0, 1][:k]
        assert found.tokens[found.owners == 1].tolist() == list(range(k))


@pytest.mark.parametrize("params", [SamplingParams(), WARM, SamplingParams(temperature=1e-30)])
def test_forbidden_tokens_are_never_found_and_disturb_nothing(params: SamplingParams) -> None:
    logits = rows_of(6, 300)
    logits[0, ::2] = FORBIDDEN
    logits[1, :] = FORBIDDEN  # nothing is left
    logits[2, 1:] = FORBIDDEN
    logits[3, 64:128] = FORBIDDEN  # a whole block
    logits[4, torch.topk(logits[4].float(), 9).indices] = FORBIDDEN
    found = check(logits, params, 32)
    assert torch.isfinite(logits[found.owners, found.tokens]).all()
    assert np.isfinite(found.scores).all()
    assert 1 not in found.owners
    assert found.tokens[found.owners == 2].tolist() == [0]
    assert found.scores[found.owners == 2] == pytest.approx(1.0)
    alone = check(logits[5:], params, 32)
    assert found.tokens[found.owners == 5].tolist() == alone.tokens.tolist()


def test_the_best_token_survives_any_bound_that_it_meets() -> None:
    """A probability that rounds to 1 and a bound of 1, whatever the temperature does to the logits."""
    logits = torch.full((16, 100), -60.0).bfloat16()
    logits[torch.arange(16), torch.arange(16)] = torch.linspace(0.1, 33.0, 16).bfloat16()
    for temperature in (0.3, 0.7, 1.1, 1e-3, 1e-30):
        found = check(logits, SamplingParams(temperature=temperature), 4, np.ones(16))
        assert found.tokens.tolist() == list(range(16))


@pytest.mark.parametrize("temperature", [7e-4, 3e-5, 3e-6])
def test_cold_requests_have_probabilities(temperature: float) -> None:
    """Products of thousands by a logit round by more than the whole distribution, unless they are of differences."""
    logits = rows_of(16, 1000)
    found = check(logits, SamplingParams(temperature=temperature), 4)
    assert found.scores.max() <= 1.0 + 1e-6
    sums = np.zeros(16)
    np.add.at(sums, found.owners, found.scores)
    np.testing.assert_allclose(sums, 1.0, rtol=1e-4)


def test_rows_of_a_wider_tensor() -> None:
    wide = rows_of(4, 1000)
    narrow = wide[:, :777]
    assert not narrow.is_contiguous()
    for rows in (narrow, wide[1:3, :70], wide[::2, 64:]):
        found = check(rows, WARM, 4)
        same = check(rows.clone(memory_format=torch.contiguous_format), WARM, 4)
        assert found.tokens.tolist() == same.tokens.tolist()


def test_no_rows_have_no_children() -> None:
    assert len(ranking.best_children(rows_of(0, 100), WARM, 4).owners) == 0


@pytest.mark.parametrize(
    ("logits", "k"),
    [
        (rows_of(2, 100).float(), 4),
        (rows_of(ranking.MOST_ROWS + 1, 100), 4),
        (rows_of(2, 100), ranking.MOST_CHILDREN + 1),
        (rows_of(100, 2).T, 4),
    ],
)
def test_what_is_not_compiled_is_ranked_by_torch(monkeypatch: pytest.MonkeyPatch, logits: Tensor, k: int) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError("ranked by compiled code")

    monkeypatch.setattr(ranking, "_compiled", lambda: never)
    with pytest.raises(AssertionError, match="compiled"):
        ranking.best_children(rows_of(2, 100), WARM, 4)
    logits = logits if logits.stride(1) == 1 else logits[:, :64]
    assert len(ranking.best_children(logits, WARM, k).owners) > 0
