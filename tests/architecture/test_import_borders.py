"""Imports go downwards only (design.md section 3); folders on one line do not import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "outrider"

LAYERS = [
    {"cli", "server"},
    {"bench", "training", "audit"},
    {"engine"},
    {"schedules"},
    {"drafters", "verifiers"},
    {"heads"},
    {"models"},
    {"trees", "sampling", "memory", "distributed", "text"},
    {"config", "types", "errors"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported_parts(path: Path) -> set[str]:
    """First component below ``outrider`` of every import in a file."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "outrider" else node.module for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts.update(name.split(".")[1] for name in names if name.startswith("outrider."))
    return parts


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own not in RANK:  # __init__ and __main__ of the package itself
        return
    for part in imported_parts(path) - {own}:
        if part == "__version__":
            continue
        assert part in RANK, f"{path.name} imports outrider.{part}, which has no layer"
        bottom = RANK[own] == RANK[part] == len(LAYERS) - 1
        assert RANK[part] > RANK[own] or bottom, f"{own}/{path.name} must not import outrider.{part}"


def test_only_build_and_registry_see_every_family() -> None:
    families = {"drafters", "verifiers", "schedules", "models"}
    seeing = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if families <= imported_parts(path) and path.relative_to(PACKAGE).parts[0] != "schedules"
    }
    assert seeing == {"engine/build.py"}


@pytest.mark.parametrize("module", ["outrider", "outrider.cli"])
def test_start_up_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names() -> None:
    import outrider

    assert outrider.__all__ == sorted(outrider.__all__)
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError):
        _ = outrider.nonsense
