"""Limits of the sampling parameters, and that a mistake is told in one sentence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from outrider.errors import InvalidOptionError, UsageError
from outrider.sampling.params import SamplingParams
from outrider.types import Regime


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 101),
        ("grammar", "root ::= 'a'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidOptionError) as error:
        SamplingParams.parse(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}={value!r} is not allowed: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 100},
        {"top_k": 0},
        {"top_p": 1},
        {"min_p": 1.0},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"max_tokens": 0},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(values: dict[str, object]) -> None:
    parsed = SamplingParams.parse(**values)
    ((name, value),) = values.items()
    assert getattr(parsed, name) == value


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(InvalidOptionError, match="unknown option 'temprature'"):
        SamplingParams.parse(temprature=1.0)


def test_mistakes_are_usage_errors_with_exit_code_2() -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams.parse(top_p=7)
    assert error.value.exit_code == 2


def test_one_stop_string_or_many() -> None:
    assert SamplingParams.parse(stop="END").stop == ("END",)
    assert SamplingParams.parse(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(stop: object) -> None:
    with pytest.raises(InvalidOptionError, match="a stop string must not be empty"):
        SamplingParams.parse(stop=stop)


def test_regime_follows_temperature() -> None:
    assert SamplingParams().regime is Regime.GREEDY
    assert SamplingParams(temperature=1e-6).regime is Regime.SAMPLED


def test_parameters_cannot_change_during_a_request() -> None:
    with pytest.raises(ValidationError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
