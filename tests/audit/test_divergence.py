"""Where two greedy outputs part, and what the audit says of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.tiny_engines import ScriptModel, build_engine, letters_tokenizer
from outrider.audit.divergence import NEAR_TIE, compare_outputs
from outrider.engine.engine import Engine
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams


class Table(ToyModel):
    """Fixed logits in every place: 3 leads 4 by ``gap``; 5 ties with 6 far below; 12 (padding) is above all."""

    def __init__(self, gap: float) -> None:
        super().__init__(vocab_size=13)
        self.row = torch.full((13,), -5.0, dtype=torch.float64)
        self.row[3], self.row[4], self.row[5], self.row[6], self.row[12] = 2.0, 2.0 - gap, 0.0, 0.0, 9.0

    def _logits(self, view: object, layers: int) -> Tensor:
        return self.row


def engine_on(model: ToyModel) -> Engine:
    return build_engine("none", target=model, tokenizer=letters_tokenizer(12))


def test_identical() -> None:
    comparison = compare_outputs(engine_on(Table(1.0)), [1, 2], [3, 3, 3], [3, 3, 3])
    assert comparison.is_identical
    assert (comparison.tokens, comparison.position, comparison.is_near_tie) == (3, None, False)
    assert comparison.describe() == "outputs are identical (3 tokens)"


def test_near_tie() -> None:
    """U04: explained by rounding: both choices are the best token within the tolerance of the precision."""
    comparison = compare_outputs(engine_on(Table(1e-10)), [1, 2], [3, 3, 3], [3, 4, 3])
    assert not comparison.is_identical
    assert (comparison.position, comparison.choices) == (1, (3, 4))
    assert comparison.gap == pytest.approx(1e-10, rel=1e-3)
    assert comparison.is_near_tie
    assert "token 1" in comparison.describe()
    assert "a near tie" in comparison.describe()
    assert "NOT" not in comparison.describe()


def test_wide_gap() -> None:
    comparison = compare_outputs(engine_on(Table(0.25)), [1], [3, 3], [4, 3])
    assert (comparison.position, comparison.gap, comparison.is_near_tie) == (0, 0.25, False)
    assert "NOT a near tie" in comparison.describe()
    assert "0.25" in comparison.describe()


def test_a_tie_of_two_losers_explains_nothing() -> None:
    comparison = compare_outputs(engine_on(Table(1.0)), [1, 2], [5], [6])
    assert comparison.gap == pytest.approx(2.0)
    assert not comparison.is_near_tie


@pytest.mark.parametrize(("first", "second"), [([3, 3], [3, 3, 3]), ([3, 3, 3], [3, 3]), ([], [3])])
def test_length_difference(first: list[int], second: list[int]) -> None:
    """One output is the other one's beginning: no tie of logits can explain that."""
    comparison = compare_outputs(engine_on(Table(0.0)), [1, 2], first, second)
    assert comparison.position == min(len(first), len(second))
    assert not comparison.is_identical
    assert not comparison.is_near_tie
    assert "ends after" in comparison.describe()
    assert "inf" not in comparison.describe()


def test_one_token_prompt_and_the_tolerance_of_the_model_s_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a one-token prompt has no prefix to read; a model in bfloat16 is given its own tolerance."""
    model = Table(0.25)
    monkeypatch.setattr(model, "dtype", torch.bfloat16, raising=False)
    comparison = compare_outputs(engine_on(model), [1], [3], [4])
    assert comparison.tolerance == NEAR_TIE[torch.bfloat16]
    assert comparison.is_near_tie


def test_the_prefix_that_was_really_written_is_evaluated() -> None:
    """The target is asked after prompt and common output, not after something else."""
    script = ScriptModel([3, 4, 5, 6], 2, 12)
    comparison = compare_outputs(engine_on(script), [1, 2], [3, 4, 5], [3, 4, 7])
    assert (comparison.position, comparison.gap) == (2, 12.0)


def test_no_gradients_and_no_trace_in_the_engine() -> None:
    engine = build_engine("small_model", "chain:3")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    before = engine.generate([1, 2], params).tokens
    compare_outputs(engine, [1, 2], before, (*before[:3], 9, 9))
    assert engine.generate([1, 2], params).tokens == before


def test_penalties_are_part_of_the_comparison() -> None:
    """A bias that makes two tokens tie explains a difference that the raw logits would call wide."""
    engine = engine_on(Table(0.25))
    wide = compare_outputs(engine, [1], [3, 3], [4, 3])
    assert wide.gap is not None
    assert not wide.is_near_tie
    biased = compare_outputs(engine, [1], [3, 3], [4, 3], SamplingParams(logit_bias={4: wide.gap}))
    assert biased.is_near_tie
