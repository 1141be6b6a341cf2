"""Copy trained heads and small models into the package and name them in its index.

    python recipes/smollm2-135m/ship.py HEADS_FOLDER

Takes what is there: METHOD.safetensors, with the training's curves as a picture, and draft-1, draft-2. Every file must
stay under 25 MB. The table of trainings in docs/heads.md is made of all files' cards.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import outrider
from outrider.heads.file import load_head, read_card
from outrider.models.fingerprint import fingerprint
from outrider.models.shipped import folder, ship, shipped_models
from outrider.training.curves import draw_curves, read_curves, write_curves

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
METHODS = ("eagle3", "eagle", "mtp", "medusa", "hydra", "layer_skip")
DEFAULT = [
    "hybrid:ngram@chain:{guesses}+(eagle3@best_first:{guesses},depth=4,decay=1,min_path_probability=0.2,min_expand_probability=0.6)",
    "eagle3",  # where a shape is asked for
]
LARGEST = 25_000_000


def main() -> None:
    source = Path(sys.argv[1])
    target = ROOT / "src" / "outrider" / "data" / "heads"
    key = fingerprint(outrider.load(MODEL, drafter="none").model)
    index_file = target / "index.json"
    index = json.loads(index_file.read_text()) if index_file.exists() else {}
    entry = index.setdefault(key, {"model": MODEL, "heads": {}})
    entry["default"] = DEFAULT
    (target / MODEL).mkdir(parents=True, exist_ok=True)
    pictures = ROOT / "docs" / "heads"
    for method in METHODS:
        file = source / f"{method}.safetensors"
        if not file.exists():
            continue
        if file.stat().st_size >= LARGEST:
            sys.exit(f"{file} has {file.stat().st_size} bytes; the limit is {LARGEST}")
        if load_head(file, method).config.target != key:
            sys.exit(f"{file} was trained on another target")
        shutil.copyfile(file, target / MODEL / file.name)
        entry["heads"][method] = f"{MODEL}/{file.name}"
        copy_curves(source, method, pictures)
        print(method, json.dumps(read_card(file))[:300])
    part = index_file.with_suffix(".part")
    part.write_text(json.dumps(index, indent=1) + "\n")
    os.replace(part, index_file)
    for number in (1, 2):
        model = source / f"draft-{number}"
        if model.exists():
            name = f"{MODEL}-draft-{number}"
            what = "boost-tuned small draft model" + (", trained where the first one fails" if number == 2 else "")
            ship(model, folder() / name, f"{what} for {MODEL}", "Apache-2.0")
            print(name)
    page = ROOT / "docs" / "heads.md"
    head, _, rest = page.read_text().partition("<!-- trainings:begin -->")
    tail = rest.partition("<!-- trainings:end -->")[2]
    rows = table(target, entry["heads"])
    page.write_text(f"{head}<!-- trainings:begin -->\n{rows}\n<!-- trainings:end -->{tail}")


def copy_curves(source: Path, method: str, pictures: Path) -> None:
    """The training's curves; behind those of its earlier stages METHOD_a, METHOD_b, ... where there were any."""
    rows: list[dict[str, Any]] = []
    for stage in (*sorted(source.glob(f"{method}_?.curves.jsonl")), source / f"{method}.curves.jsonl"):
        before = rows[-1]["tokens"] if rows else 0
        if stage.exists():
            rows += [{**row, "tokens": row["tokens"] + before} for row in read_curves(stage)]
    write_curves(pictures, rows, f"{method}.curves.jsonl")
    draw_curves(rows, pictures / f"{method}.png", method)


def table(target: Path, heads: dict[str, str]) -> str:
    lines = [
        "| file | MB | training tokens | epochs | hours | vocabulary covers | held-out top-1 by step | simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cards = [(name, target / file, read_card(target / file)) for name, file in heads.items()]
    for name, model in shipped_models().items():
        cards.append(
            (name, model.directory / "model.safetensors", json.loads((model.directory / "card.json").read_text()))
        )
    lines += [row(name, file, card) for name, file, card in cards]
    lines += ["", "Commands (folders are those of the development machine):", "", "```text"]
    lines += [str(card["command"]) for _, _, card in cards]
    return "\n".join([*lines, "```"])


def row(name: str, file: Path, card: dict[str, Any]) -> str:
    found = card.get("validation") or {}
    top1 = " ".join(f"{value:.2f}" for value in found.get("top1", []))
    coverage = card.get("draft_vocabulary_coverage")
    covered = f"{coverage:.1%}" if coverage else "all"
    return (
        f"| `{name}` | {file.stat().st_size / 1e6:.1f} | {card['tokens']:,} | {card['epochs']:.2f} | "
        f"{card['hours']:.2f} | {covered} | {top1} | {found.get('acceptance', float('nan')):.2f} |"
    )


if __name__ == "__main__":
    main()
