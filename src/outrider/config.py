"""What an engine is made of, as the user names it. Imports nothing of the package but errors and types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.types import ProposalKind

AUTO = "auto"
FALLBACK_DRAFTER = "ngram"
"""What ``auto`` stands for with a target that no trained head ships for."""


class EngineConfig(BaseModel):
    """One engine. Parts are given as ``name`` or ``name:option=value,option=value`` (``engine/spec.py``).

    ``drafter`` ``auto`` is the best that ships for the target and fits the other options, else n-grams.
    ``shape``, ``verifier`` and ``proposal`` may be left out: the drafter's default shape; the best children at
    temperature 0 and for n-grams, drawn children otherwise; greedy matching at temperature 0, above it sample matching
    for the best children and multi-step sampling for drawn ones. ``lossy`` admits a verifier that changes the output,
    and must be said.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    draft_model: str | None = None
    drafter: str = AUTO
    shape: str | None = None
    verifier: str | None = None
    proposal: ProposalKind | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Annotated[int | None, Field(ge=1, description="compute threads; default: one per core")] = None
    max_nodes: Annotated[
        int | None, Field(ge=0, le=4096, description="guesses per step at most; default: what the shape makes")
    ] = None
    adaptive: bool = True
    lossy: bool = False
    fallback: bool = False
    trust_remote_code: bool = False

    @property
    def known_drafter(self) -> str:
        """The drafter before a model is loaded: ``auto`` may become a trained head of the target afterwards."""
        return FALLBACK_DRAFTER if self.drafter == AUTO else self.drafter

    @property
    def draft_models(self) -> tuple[str, ...]:
        """``draft_model`` may name several, separated by commas, for drafters with several members."""
        names = (self.draft_model or "").split(",")
        return tuple(name.strip() for name in names if name.strip())
