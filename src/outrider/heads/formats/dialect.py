"""Numbers of the target's layers, as the projects count them.

Outrider, transformers' ``hidden_states`` and vLLM: id i is the input of block i (the output of block i - 1). SGLang's
explicit ids: id i is the output of block i, one less for the same state. Off by one, a head still runs and guesses
badly (vLLM issue 43671), so every format translates here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from outrider.errors import IllegalCombinationError, ModelFileError
from outrider.heads.config import Feature


class Dialect(Enum):
    """Who counts; the value is added to an id of theirs to give ours."""

    VLLM = 0
    SGLANG = 1


def to_features(ids: Sequence[int], dialect: Dialect, where: object) -> tuple[Feature, ...]:
    """Layer ids of a file -> inputs of blocks.

    Raises:
        ModelFileError: negative or repeated ids.
    """
    features = tuple(layer + dialect.value for layer in ids)
    if len(set(features)) != len(features) or min(features) < 0:
        raise ModelFileError(f"{where} names the layers {list(ids)}, which must be different and not negative")
    return features


def from_features(features: Sequence[Feature], dialect: Dialect) -> list[int]:
    """Inputs of blocks -> layer ids of a file.

    Raises:
        IllegalCombinationError: a state that this dialect has no number for.
    """
    ids = []
    for name in features:
        if not isinstance(name, int) or name < dialect.value:
            raise IllegalCombinationError(
                f"the head reads the hidden state '{name}', which {dialect.name.lower()} has no layer number for"
            )
        ids.append(name - dialect.value)
    return ids
