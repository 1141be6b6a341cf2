"""A fake engine behind the commands, and what it was loaded with."""

from __future__ import annotations

import pytest
from fake_engine import Loader

from outrider.cli import engine_factory


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    made = Loader()
    monkeypatch.setattr(engine_factory, "load_engine", made)
    return made
