"""Outrider: speculative decoding that makes large language models answer faster without changing what they answer.

    import outrider
    engine = outrider.load("smollm2-135m", drafter="ngram")
    print(engine.generate("Name three rivers.").text)

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.audit.divergence import Comparison, compare_outputs
    from outrider.config import EngineConfig
    from outrider.engine.engine import Engine, load
    from outrider.engine.result import Event, Result
    from outrider.engine.stats import Stats
    from outrider.sampling.params import SamplingParams
    from outrider.types import FinishReason, StepRecord

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "outrider.audit.divergence",
    "Engine": "outrider.engine.engine",
    "EngineConfig": "outrider.config",
    "Event": "outrider.engine.result",
    "FinishReason": "outrider.types",
    "Result": "outrider.engine.result",
    "SamplingParams": "outrider.sampling.params",
    "Stats": "outrider.engine.stats",
    "StepRecord": "outrider.types",
    "compare_outputs": "outrider.audit.divergence",
    "load": "outrider.engine.engine",
}

__all__ = [
    "Comparison",
    "Engine",
    "EngineConfig",
    "Event",
    "FinishReason",
    "Result",
    "SamplingParams",
    "Stats",
    "StepRecord",
    "compare_outputs",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
