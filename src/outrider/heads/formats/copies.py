"""Copies of the target's own matrices that some head files hold: compared, never kept.

Outrider's heads embed with the target's own matrix. A file whose copy is another matrix (trained along, or random)
would guess badly with it, so that is an error and not a loss of acceptance that nobody sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ModelFileError
from outrider.heads.formats.base import TargetFacts
from outrider.heads.formats.raw import RawHead

NAME = "embed_tokens.weight"
_LEAST_SIMILARITY = 0.9
"""Mean cosine of rows: a 4-bit target's rows keep 0.99 of their originals, unrelated rows 0."""
_SAMPLE = 512


def drop_embedding(raw: RawHead, vocabulary: int, hidden: int, target: TargetFacts | None) -> frozenset[str]:
    """Names of the embedding in ``raw`` (one or none) after checking its shape, and its rows against the target's.

    Raises:
        ModelFileError: another shape, or another matrix than the target's.
    """
    if NAME not in raw.names:
        return frozenset()
    shape = raw.shape(NAME)
    if shape != (vocabulary, hidden):
        raise ModelFileError(f"{raw.path}: '{NAME}' has shape {list(shape)}, not [{vocabulary}, {hidden}]")
    if target is not None and (target.vocab_size, target.hidden_size) == shape:
        check_copy(raw, NAME, target.embedding(), f"the embedding of '{target.name}'")
    return frozenset({NAME})


def check_copy(raw: RawHead, name: str, theirs: Tensor, what: str) -> None:
    """Compare a stored copy of a target's matrix with the target's own, [rows, H] both, by a sample of rows.

    Raises:
        ModelFileError: it is another matrix.
    """
    stored = raw.tensor(name)
    rows = torch.linspace(0, len(stored) - 1, min(_SAMPLE, len(stored))).long()
    mine, other = stored[rows].float(), theirs[rows.to(theirs.device)].float().cpu()
    similarity = float(F.cosine_similarity(mine, other, dim=-1).nanmean())
    if not similarity >= _LEAST_SIMILARITY:
        raise ModelFileError(
            f"{raw.path}: '{name}' is not {what} (rows agree by {similarity:.2f}): the head was made for another "
            "model, or trained a matrix of its own there, which heads here lack"
        )
