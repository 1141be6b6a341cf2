"""Heads that ship with the package: ``data/heads/index.json``, by the target's fingerprint.

An entry names the model, the file of each method, and the drafters that ``auto`` stands for with this target: the first
one that can be built with the other options. ``{guesses}`` in their names is what a cheap pass of the target checks.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.models.base import LanguageModel
from outrider.models.fingerprint import fingerprint


def shipped_head(method: str, target: LanguageModel) -> Path | None:
    """The file of the package for this target and method, if there is one."""
    name = _entry(target).get("heads", {}).get(method)
    return None if name is None else _folder() / name


def default_drafters(target: LanguageModel) -> tuple[str, ...]:
    """The drafters that ``auto`` may stand for with this target, best first; none if no heads ship for it."""
    return tuple(_filled(name, target.cheap_rows - 1) for name in _entry(target).get("default", ()))


def all_default_drafters() -> tuple[str, ...]:
    """Every drafter that ``auto`` may stand for with some target; how many guesses it makes is open."""
    names = (name for entry in _index().values() for name in entry.get("default", ()))
    return tuple(dict.fromkeys(_filled(name, 1) for name in names))


def _filled(name: str, guesses: int) -> str:
    return name.replace("{guesses}", str(guesses))


def _entry(target: LanguageModel) -> dict[str, Any]:
    entries = _index()
    return entries.get(fingerprint(target) or "", {}) if entries else {}


def _index() -> dict[str, dict[str, Any]]:
    """Fingerprint -> entry."""
    path = _folder() / "index.json"
    if not path.is_file():
        return {}
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries


def _folder() -> Path:
    return Path(str(resources.files("outrider") / "data" / "heads"))
