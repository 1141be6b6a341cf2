"""Boosting of small models: the next one is trained on what the earlier ones get wrong.

SpecInfer (arXiv 2305.09781) drops the prompts that a small model continues as the target does, and trains the next
one on the rest. With answers of a hundred tokens hardly any is continued without a mistake, so answers are ranked by
how often an earlier model's best token is the target's on the answer's own text, and the lower half is what the next
one learns from. Together, as an ``ensemble``, the models then guess what each alone would miss. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import UsageError
from outrider.models.base import LanguageModel, Segment
from outrider.models.whole_file import whole_file
from outrider.training.packing import Corpus, Piece

Progress = Callable[[int, int], None]
"""Told (answers done, answers in all)."""

_IDENTITY = "outrider.boosting"
_ROWS = 2048  # tokens of one pass


@torch.inference_mode()
def agreements(corpus: Corpus, models: Sequence[LanguageModel], progress: Progress) -> Tensor:
    """Of each training answer, the share of its tokens for which some model's best token is the target's.

    The text is teacher-forced: models read the target's answer, not their own.

    Returns:
        float32 [answers], in the order of ``corpus.training``.

    Raises:
        UsageError: for answers that are longer than a model's context.
    """
    shortest = min(model.context_length for model in models)
    if corpus.row > shortest:
        raise UsageError(
            f"an earlier model's context is {shortest} tokens, but answers have up to {corpus.row}; "
            f"give a --row of {shortest} tokens or fewer"
        )
    shares: list[float] = []
    for group in _groups(corpus.training):
        known = [_best(corpus, piece) for piece in group]
        hits = torch.stack([_hits(model, corpus, group, known) for model in models]).any(dim=0)
        lengths = [len(best) for best in known]
        shares += [float(part.float().mean()) for part in torch.split(hits, lengths)]
        progress(len(shares), len(corpus.training))
    return torch.tensor(shares)


def select(corpus: Corpus, agreement: Tensor, weight: int = 0) -> Corpus:
    """The corpus for the next model: answers below the median agreement.

    Args:
        agreement: of the training answers.
        weight: 0 keeps these answers alone, as SpecInfer does; n >= 2 keeps all answers and shows these n times as
            often.

    Raises:
        UsageError: when no answer is below the median (the earlier models are right about all to the same degree).
    """
    is_missed = (agreement < agreement.median()).tolist()
    missed = [piece for piece, is_it in zip(corpus.training, is_missed, strict=True) if is_it]
    if not missed:
        raise UsageError("the earlier models agree with every answer to the same degree: nothing to boost against")
    training = missed if weight == 0 else [*corpus.training, *missed * (weight - 1)]
    return replace(corpus, training=training)


def read_agreements(path: Path, identity: str) -> Tensor | None:
    """The agreements of ``path``, if they are there and of the same answers and models."""
    try:
        with safe_open(path, "pt") as file:
            found: Tensor = file.get_tensor("agreement")
            return found if file.metadata() == {_IDENTITY: identity} else None
    except (OSError, SafetensorError):
        return None


def write_agreements(path: Path, agreement: Tensor, identity: str) -> None:
    """Keep agreements, which may have taken long, for the next start.

    Raises:
        RunError: when they cannot be stored.
    """
    with whole_file(path, "make room or choose another --work-dir") as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"agreement": agreement}, part, metadata={_IDENTITY: identity})


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbouring answers, about ``_ROWS`` tokens of them each."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not groups or len(piece) > room:
            groups.append([])
            room = _ROWS
        groups[-1].append(piece)
        room -= len(piece)
    return groups


def _rows(piece: Piece) -> range:
    """Rows of the answer that predict one of its tokens."""
    return range(max(0, piece.prompt - 1), len(piece) - 1)


def _best(corpus: Corpus, piece: Piece) -> Tensor:
    """The target's best tokens at ``_rows``."""
    rows = _rows(piece)
    return corpus.shards[piece.shard].best[piece.start + rows.start : piece.start + rows.stop].long()


def _hits(model: LanguageModel, corpus: Corpus, group: Sequence[Piece], known: Sequence[Tensor]) -> Tensor:
    """Whether the model's best token is the target's, for all answers' rows one after the other."""
    segments = [
        Segment(
            model.new_cache(),
            corpus.shards[piece.shard].tokens[piece.start : piece.stop - 1].tolist(),
            logit_rows=_rows(piece),
        )
        for piece in group
    ]
    found = torch.cat([output.logits.argmax(dim=-1) for output in model.forward(segments)])
    return found.cpu() == torch.cat(list(known))
