"""The sampling parameters a user may set, their limits, and nothing else."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outrider.errors import InvalidOptionError, UsageError
from outrider.types import Regime


class SamplingParams(BaseModel):
    """Every field is honoured at every verified position, with any drafter, or the request is refused.

    Names follow vLLM. ``temperature`` 0 is greedy decoding; ``seed`` then changes nothing. The order of application
    is: repetition, presence and frequency penalties, ``logit_bias``, ``min_tokens``, temperature, ``top_k``, ``top_p``,
    ``min_p`` (see ``sampling/transform.py``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0, description="keep the k best tokens; 0 keeps all")] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict)
    max_tokens: Annotated[int, Field(ge=0, description="output tokens at most")] = 256
    min_tokens: Annotated[int, Field(ge=0, description="no stop before this many output tokens")] = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: Annotated[int | None, Field(ge=0, lt=2**64)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=100, description="best tokens to report at each position")] = None
    grammar: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stop_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("a stop string must not be empty")
        if any("\ud800" <= character <= "\udfff" for text in value for character in text):
            raise ValueError("a stop string must be valid Unicode")
        return value

    @field_validator("grammar")
    @classmethod
    def _grammar_not_yet(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("constrained decoding is not supported yet; leave grammar unset")
        return value

    @property
    def regime(self) -> Regime:
        return Regime.GREEDY if self.temperature == 0.0 else Regime.SAMPLED

    @classmethod
    def parse(cls, **values: object) -> SamplingParams:
        """Build from user input.

        Raises:
            UsageError: naming the parameter, its value and what is allowed, one sentence for the first mistake.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise usage_error(error) from None


def usage_error(error: ValidationError) -> UsageError:
    """A pydantic error as one sentence: the option, the value given, what is allowed."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "value"
    if first["type"] == "extra_forbidden":
        return InvalidOptionError(f"unknown option '{name}'")
    message = first["msg"].removeprefix("Value error, ")
    return InvalidOptionError(f"{name}={first['input']!r} is not allowed: {message[0].lower()}{message[1:]}")
