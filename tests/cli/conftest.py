"""A fake engine behind the commands, and what it was loaded with."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import Loader

from outrider.cli import engine_factory
from outrider.training import curves


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Pictures of curves that were asked for: drawing one takes longer than a tiny training."""
    asked: list[Path] = []
    monkeypatch.setattr(curves, "draw_curves", lambda rows, path, title: asked.append(path))
    return asked


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader()
    monkeypatch.setattr(engine_factory, "load_engine", made)
    return made
