"""How a training went: a JSON lines file always, a picture of it where matplotlib is installed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import RunError, UsageError
from outrider.models.whole_file import whole_file

CURVES = "curves.jsonl"


def write_curves(folder: Path, rows: Sequence[dict[str, Any]], name: str = CURVES) -> Path:
    """Write one JSON object a line to ``folder/name``, whole or not at all.

    Raises:
        RunError: when it cannot be stored.
    """
    path = folder / name
    with whole_file(path, "make room and run the same command again") as part:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_curves(path: Path) -> list[dict[str, Any]]:
    """Rows of ``write_curves``.

    Raises:
        UsageError: when the file is not one of these.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if all("kind" in row and "tokens" in row for row in rows) and rows:
            return rows
    except (OSError, ValueError, TypeError):
        pass
    raise UsageError(f"{path} is not a curve file of 'outrider train' ({CURVES} in its --work-dir)")


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw loss, top-1 of each step and simulated acceptance length against tokens, as a PNG.

    Raises:
        RunError: when matplotlib is missing, or the picture cannot be stored.
    """
    try:
        importlib.import_module("matplotlib")
        agg = importlib.import_module("matplotlib.backends.backend_agg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise RunError("a picture of the curves needs matplotlib: pip install 'outrider[train]'") from None
    figure = figures.Figure(figsize=(12, 4), layout="constrained")
    agg.FigureCanvasAgg(figure)
    loss, top1, acceptance = figure.subplots(1, 3)
    for kind, style in (("training", ".-"), ("validation", "o--")):
        chosen = [row for row in rows if row["kind"] == kind]
        _draw(loss, chosen, "loss", style, kind)
        _draw(acceptance, chosen, "acceptance", style, kind)
        for step in range(max((len(row.get("top1", [])) for row in chosen), default=0)):
            part = [row for row in chosen if len(row.get("top1", [])) > step]
            values = [row["top1"][step] for row in part]
            label = f"{kind}, step {step + 1}"
            top1.plot([row["tokens"] for row in part], values, style, color=f"C{step}", label=label, markersize=3)
    titles = ("loss", "top-1 in target ids", "simulated acceptance length")
    for axes, name in zip((loss, top1, acceptance), titles, strict=True):
        axes.set_title(name)
        axes.set_xlabel("training tokens")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.suptitle(title)
    with whole_file(path, "make room or choose another place") as picture:
        figure.savefig(picture, dpi=110, format="png")


def _draw(axes: Any, rows: Sequence[dict[str, Any]], name: str, style: str, label: str) -> None:
    part = [row for row in rows if name in row]
    axes.plot([row["tokens"] for row in part], [row[name] for row in part], style, label=label, markersize=3)
