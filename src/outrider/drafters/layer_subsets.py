"""Which sublayers of a model a draft leaves out: how a subset is written, and where searched ones are kept.

``12a.13m.14`` leaves out block 12's attention, block 13's MLP and both of block 14; ``8-11m`` the MLPs of blocks 8 to
11. A searched subset (``outrider tune layers``) is one JSON file in the cache directory, under the model's fingerprint;
those that ship with the package are in ``data/layer_subsets.json``. Does not search: ``engine/layer_search.py`` does.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from outrider.errors import InvalidOptionError, ModelFileError
from outrider.models.base import LanguageModel, Sublayers
from outrider.models.fingerprint import fingerprint
from outrider.models.store import cache_directory

_ITEM = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?([am]?)")
_SHIPPED = "layer_subsets.json"


class LayerSubset(BaseModel):
    """A searched subset and the figures it was chosen by.

    Attributes:
        model: what the model was called.
        skip: the sublayers left out, in the notation above.
        matchness: share of next tokens, on the text searched on, that the draft predicts as the whole model does.
        held_out: the same on text that the search did not see.
        speedup, chain: expected speed over plain decoding, and the length of the chain that gives it.
        tokens, seed, evaluations: length of the text searched on, the search's seed, subsets tried.
        command: the command line that searches again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    skip: str
    matchness: float = Field(ge=0.0, le=1.0)
    held_out: float = Field(ge=0.0, le=1.0)
    speedup: float = Field(ge=0.0)
    chain: int = Field(ge=1)
    tokens: int = Field(ge=1)
    seed: int
    evaluations: int = Field(ge=0)
    command: str


def parse_skip(text: str, num_layers: int) -> Sublayers:
    """Sublayers named by ``text`` in a model of ``num_layers`` blocks.

    Raises:
        InvalidOptionError: for text of another form, a block that does not exist, or when nothing or all is left out.
    """
    chosen: set[int] = set()
    for item in text.split("."):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise InvalidOptionError(
                f"layer_skip skip: '{item}' is not a block; write blocks between dots, as in 12a.13m.14-16 "
                "(a: attention only, m: MLP only)"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_layers:
            raise InvalidOptionError(
                f"layer_skip skip: a model of {num_layers} blocks has no '{item}'; blocks are 0 to {num_layers - 1}"
            )
        for block in range(first, last + 1):
            chosen |= (
                {2 * block} if match[3] == "a" else {2 * block + 1} if match[3] == "m" else {2 * block, 2 * block + 1}
            )
    if len(chosen) == 2 * num_layers:
        raise InvalidOptionError("layer_skip skip: leaves nothing of the model; keep one attention or MLP at least")
    return frozenset(chosen)


def format_skip(skip: Sublayers) -> str:
    """The shortest text without ranges: ``parse_skip(format_skip(s), n) == s`` for every non-empty ``s``."""
    blocks = sorted({sublayer // 2 for sublayer in skip})
    suffix = {(True, True): "", (True, False): "a", (False, True): "m"}
    return ".".join(f"{block}{suffix[2 * block in skip, 2 * block + 1 in skip]}" for block in blocks)


def find_subset(model: LanguageModel) -> LayerSubset | None:
    """The model's tuned subset, else the shipped one, else ``None``.

    Raises:
        ModelFileError: for a stored file that is damaged or made for another number of blocks.
    """
    key = fingerprint(model)
    if key is None:
        return None
    path = _place(key)
    try:
        found: LayerSubset | None = LayerSubset.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        found = _shipped().get(key)
    except (OSError, ValidationError) as error:
        raise ModelFileError(f"cannot read the layer subset {path}: it is damaged; delete it or tune again") from error
    if found is not None:
        parse_skip(found.skip, model.num_layers)
    return found


def save_subset(model: LanguageModel, subset: LayerSubset) -> Path | None:
    """Store a subset for this model, in one step; ``None`` for a model without a fingerprint (nothing is written).

    Raises:
        OSError: when the cache directory cannot be written.
    """
    key = fingerprint(model)
    if key is None:
        return None
    path = _place(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        try:
            file.write(json.dumps(subset.model_dump(), indent=1) + "\n")
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return path


def _shipped() -> dict[str, LayerSubset]:
    text = (resources.files("outrider") / "data" / _SHIPPED).read_bytes()
    return TypeAdapter(dict[str, LayerSubset]).validate_json(text)


def _place(key: str) -> Path:
    return cache_directory() / "layer_subsets" / f"{key}.json"
