"""Small models that ship with the package: ``data/small_models/NAME``, found by their names like the catalogue's.

Such a folder holds ``config.json``, ``model.safetensors``, the training's ``card.json`` and ``shipped.json``: whose
tokenizer the model speaks. The tokenizer itself, two megabytes for the default target, is not stored again: it is the
target's own when that has the same vocabulary, else that of the model which ``shipped.json`` names.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

LISTING = "shipped.json"
FILES = ("config.json", "model.safetensors", "card.json", LISTING)


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """A model of the package.

    Attributes:
        tokenizer_of: name of the model whose tokenizer it speaks.
        vocabulary: ``text/vocabulary.py`` hash of that tokenizer.
    """

    name: str
    directory: Path
    tokenizer_of: str
    vocabulary: str
    description: str
    license: str

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return (self.directory / "model.safetensors").stat().st_size


def folder() -> Path:
    """Where they lie."""
    return Path(str(resources.files("outrider") / "data" / "small_models"))


def shipped_models() -> dict[str, ShippedModel]:
    """All of them, by name."""
    paths = sorted(folder().glob(f"*/{LISTING}"))
    return {path.parent.name: read_shipped(path.parent) for path in paths}


def read_shipped(directory: Path) -> ShippedModel:
    """One folder."""
    fields = json.loads((directory / LISTING).read_text(encoding="utf-8"))
    return ShippedModel(directory.name, directory, **fields)


def ship(source: Path, destination: Path, description: str, license_name: str) -> ShippedModel:
    """Copy a model that ``outrider train small-model`` wrote to the package's folder, without its tokenizer.

    Args:
        source: the trained model's directory; its card says whose tokenizer it speaks.
        destination: ``folder() / NAME``.
    """
    card = json.loads((source / "card.json").read_text(encoding="utf-8"))
    destination.mkdir(parents=True, exist_ok=True)
    for name in FILES[:-1]:
        shutil.copyfile(source / name, destination / name)
    fields = {
        "tokenizer_of": card["target"],
        "vocabulary": card["tokenizer"],
        "description": description,
        "license": license_name,
    }
    (destination / LISTING).write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return read_shipped(destination)
