"""A compact file of a target's answers: token ids only, a few bytes a token, so that training data can be committed.

safetensors: ``tokens`` uint16 (int32 for vocabularies above 65,536) [n], ``lengths`` and ``prompts`` int32 [answers]
(tokens of prompt and answer; of the prompt), ``index`` int64, ``temperature`` float32, ``finished`` bool. The metadata
name target, tokenizer and template. ``replay.py`` makes the features anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import UsageError
from outrider.models.whole_file import whole_file
from outrider.training.generate import Request
from outrider.training.replay import Recorded
from outrider.training.shards import Fingerprint, open_folder

ANSWERS = "outrider.answers"
_UINT16_TOKENS = 2**16
_CHECKED = ("target", "tokenizer", "template", "vocab_size")


def export_answers(folders: Sequence[Path], output: Path) -> tuple[int, int]:
    """Write the answers of feature folders (of one target), in the order of their indices, each folder behind the last.

    Returns:
        Answers and tokens written.

    Raises:
        UsageError: when a folder holds no feature files, or they are of different targets.
        RunError: when the file cannot be stored; nothing is left behind.
    """
    opened = [open_folder(folder) for folder in folders]
    key = opened[0][0]
    for folder, (other, _) in zip(folders, opened, strict=True):
        if different := sorted(set(key.differences(other)) & set(_CHECKED)):
            raise UsageError(f"{folder} was made with another {' and '.join(different)} than {folders[0]}")
    texts: list[Tensor] = []
    rows: list[tuple[int, int, float, bool]] = []
    for _, shards in opened:
        base = 1 + max((row[0] for row in rows), default=-1)
        places = sorted((shard.index[i], n, i) for n, shard in enumerate(shards) for i in range(len(shard)))
        for index, n, i in places:
            shard = shards[n]
            texts.append(shard.tokens[shard.span(i)])
            rows.append((base + index, shard.prompts[i], shard.temperature[i], shard.finished[i]))
    indices, prompts, temperature, finished = zip(*rows, strict=True)
    tokens = torch.cat(texts)
    tensors = {
        "tokens": tokens.to(torch.uint16 if key.vocab_size <= _UINT16_TOKENS else torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompts": torch.tensor(prompts, dtype=torch.int32),
        "index": torch.tensor(indices, dtype=torch.int64),
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "finished": torch.tensor(finished),
    }
    metadata = {ANSWERS: json.dumps({name: getattr(key, name) for name in _CHECKED})}
    with whole_file(output, "make room and run it again") as part:
        save_file(tensors, part, metadata=metadata)
    return len(rows), len(tokens)


def read_answers(path: Path, target: Fingerprint) -> list[Recorded]:
    """The answers of a file, for the target that wrote them.

    Raises:
        UsageError: when the file is not one of ``export_answers``, or of another target, tokenizer or template.
    """
    try:
        with safe_open(path, "pt") as file:
            made = json.loads((file.metadata() or {})[ANSWERS])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if different := [name for name in _CHECKED if made.get(name) != getattr(target, name)]:
            raise UsageError(
                f"the answers in {path} are of another {' and '.join(different)}; use the model that wrote them"
            )
        return _recorded(tensors, target.vocab_size)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UsageError(f"{path} is not a file of 'outrider train export-answers': {error}") from None


def _recorded(tensors: Mapping[str, Tensor], vocab_size: int) -> list[Recorded]:
    texts = torch.split(tensors["tokens"].to(torch.int32), tensors["lengths"].tolist())
    columns = [tensors[name].tolist() for name in ("index", "prompts", "temperature", "finished")]
    found = []
    for text, index, prompt, temperature, finished in zip(texts, *columns, strict=True):
        ids = text.tolist()
        if not 0 < prompt < len(ids) or not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"answer {index} has impossible tokens")
        found.append(Recorded(Request(index, ids[:prompt], temperature), ids, finished))
    if len({one.request.index for one in found}) < len(found):
        raise ValueError("an index is there twice")
    return found


def answer_tokens_digest(path: Path) -> str:
    """SHA-256 of the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
