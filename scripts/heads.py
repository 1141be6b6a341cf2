"""Measure trained heads on Spec-Bench: tokens per pass of the target, and seconds against plain decoding.

    python scripts/heads.py measure ARM [ARM ...] [--questions 480] [--batch 1] [--data FILE.jsonl]
    python scripts/heads.py report

``measure`` answers the first turn of every question (up to 128 new tokens, default model, bfloat16) with each arm in
turn, question by question (A B A B), and appends one row per answer to docs/results/heads.jsonl; rows that exist are
skipped, so a run that was stopped goes on. ``--questions 120`` takes every fourth question of each group. Arms timed
together must run with ``--batch 1`` and nothing else on the machine: the load average is in every row. ``--batch 16``
decodes that many questions at once, for acceptance only (its rows carry no seconds). ``report`` writes the tables of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.reexec import ensure_allocator

if __name__ == "__main__":
    ensure_allocator()

import numpy as np
from benchmark import FIVE, MODEL, ROOT, environment, publish

import outrider
from outrider.engine.engine import Engine
from outrider.engine.result import Result

ROWS = ROOT / "docs" / "results" / "heads.jsonl"
NEW_TOKENS = 128
GROUPS = (*FIVE, "mt_bench")


@dataclass(frozen=True)
class Arm:
    """One configuration; ``temperature`` 1 draws with the seed of the question's number."""

    drafter: str = "none"
    shape: str | None = None
    temperature: float = 0.0
    draft_model: str | None = None
    verifier: str | None = None
    weights: str = "auto"

    def engine(self) -> Engine:
        return outrider.load(
            MODEL,
            drafter=self.drafter,
            shape=self.shape,
            draft_model=self.draft_model,
            verifier=self.verifier,
            dtype="bfloat16",
            weights=self.weights,
            adaptive=False,
        )


ARMS = {
    # The default: what the command line uses for this model.
    "plain": Arm(),
    "default": Arm("auto"),
    "plain-t1": Arm(temperature=1.0),
    "plain-bf16": Arm(weights="bf16"),
    "eagle3-bf16": Arm("eagle3", "best_first:16,preset=eagle2", weights="bf16"),
    "eagle3": Arm("eagle3"),
    "eagle3-tree": Arm("eagle3", "best_first:32,preset=eagle2"),
    "eagle3-chain": Arm("eagle3", "chain:7"),
    "eagle3-t1": Arm("eagle3", temperature=1.0),
    "eagle3-chain-t1": Arm("eagle3", "chain:5", temperature=1.0),
    "ngram": Arm("ngram"),
    "eagle3+ngram": Arm("ensemble:(eagle3@best_first:16,preset=eagle2)+ngram"),
    "eagle": Arm("eagle"),
    "eagle-chain": Arm("eagle", "chain:5"),
    "medusa": Arm("medusa"),
    "hydra": Arm("hydra"),
    "mtp": Arm("mtp"),
    "layer_skip-exit": Arm("layer_skip:head=auto"),
    "boost-1": Arm("small_model", "best_first:16", draft_model="smollm2-135m-draft-1"),
    "boost-2": Arm("small_model", "best_first:16", draft_model="smollm2-135m-draft-2"),
    "boost-1+2": Arm(
        "ensemble:(small_model@best_first:8)+(small_model@best_first:8)",
        draft_model="smollm2-135m-draft-1,smollm2-135m-draft-2",
    ),
}


@dataclass(frozen=True)
class Question:
    """The first turn of a Spec-Bench question; ``number`` is its line."""

    number: int
    group: str
    text: str


def questions_of(path: Path, count: int) -> list[Question]:
    """All 480, or a fixed part evenly spread over the groups."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    every = max(1, len(rows) // count)
    seen: dict[str, int] = {}
    found = []
    for number, row in enumerate(rows):
        group = row["category"] if row["category"] in FIVE else "mt_bench"
        if seen.get(group, 0) % every == 0:
            found.append(Question(number, group, row["turns"][0]))
        seen[group] = seen.get(group, 0) + 1
    return found


def row_of(name: str, question: Question, result: Result, is_timed: bool) -> dict[str, object]:
    stats = result.stats
    return {
        "arm": name,
        "question": question.number,
        "group": question.group,
        "tokens": len(result.tokens),
        "passes": stats.num_drafts,
        "accepted": stats.num_accepted_tokens,
        "drafted": stats.num_draft_tokens,
        "seconds": round(stats.decode_seconds, 4) if is_timed else None,
        "prefill": round(stats.prefill_seconds, 4) if is_timed else None,
        "load": round(os.getloadavg()[0], 2),
        "digest": hash(result.tokens) & 0xFFFFFFFF,
    }


def known_rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def measure(args: argparse.Namespace) -> None:
    done = {(row["arm"], row["question"]) for row in known_rows()}
    questions = questions_of(args.data, args.questions)
    engines = {name: ARMS[name].engine() for name in args.arms}
    for engine in engines.values():
        engine.generate("Warm up.", outrider.SamplingParams(max_tokens=8))
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    with ROWS.open("a") as file:
        if args.batch > 1:
            rows = _batched(engines, questions, done, args.batch)
        else:
            rows = _interleaved(engines, questions, done)
        for count, row in enumerate(rows, 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"\r{count} {row['arm']} {row['question']}", end="", file=sys.stderr)
    print(file=sys.stderr)


def params_of(arm: Arm, question: Question) -> outrider.SamplingParams:
    seed = question.number if arm.temperature else None
    return outrider.SamplingParams(max_tokens=NEW_TOKENS, temperature=arm.temperature, seed=seed)


def _interleaved(
    engines: dict[str, Engine], questions: list[Question], done: set[tuple[object, object]]
) -> Iterator[dict[str, object]]:
    for question in questions:
        for name, engine in engines.items():
            if (name, question.number) not in done:
                result = engine.generate(question.text, params_of(ARMS[name], question))
                yield row_of(name, question, result, is_timed=True)


def _batched(
    engines: dict[str, Engine], questions: list[Question], done: set[tuple[object, object]], batch: int
) -> Iterator[dict[str, object]]:
    for name, engine in engines.items():
        left = [q for q in questions if (name, q.number) not in done]
        requests = ((q, q.text, params_of(ARMS[name], q)) for q in left)
        for key, result in engine.run(requests, batch=batch):
            assert isinstance(key, Question)
            yield row_of(name, key, result, is_timed=False)


# -- the tables ----------------------------------------------------------------------------------------------------


def acceptance_table(rows: list[dict[str, object]]) -> list[str]:
    """Mean acceptance length (tokens per pass of the target, bonus included) by group; all tokens over all passes."""
    lines = ["| arm | questions | " + " | ".join(GROUPS) + " | all |", "|---|---|" + "---|" * (len(GROUPS) + 1)]
    for name in ARMS:
        mine = [row for row in rows if row["arm"] == name and row["passes"]]
        if not mine or name.startswith("plain"):
            continue
        cells = [_length([r for r in mine if r["group"] == group]) for group in GROUPS]
        lines.append(f"| {name} | {len(mine)} | " + " | ".join(cells) + f" | {_length(mine)} |")
    return lines


def _length(rows: list[dict[str, object]]) -> str:
    passes = sum(int(str(row["passes"])) for row in rows)
    kept = sum(int(str(row["accepted"])) for row in rows) + passes
    return f"{kept / passes:.2f}" if passes else ""


def speed_table(rows: list[dict[str, object]]) -> list[str]:
    """Paired ratio of decoding tokens per second against plain decoding, median (bootstrap 95%)."""
    by_key = {(row["arm"], row["question"]): row for row in rows if row["seconds"]}
    lines = [
        "| arm | " + " | ".join(GROUPS) + " | all, median | all, total time |",
        "|---|" + "---|" * (len(GROUPS) + 2),
    ]
    for name, arm in ARMS.items():
        base = "plain-t1" if arm.temperature else "plain-bf16" if arm.weights == "bf16" else "plain"
        pairs = [(row, by_key[base, q]) for (a, q), row in by_key.items() if a == name and (base, q) in by_key]
        if not pairs or name == base:
            continue
        cells = [_ratio([p for p in pairs if p[0]["group"] == group]) for group in GROUPS]
        fast, slow = (sum(_seconds_each(p[i]) for p in pairs) for i in (0, 1))
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {_ratio(pairs)} | {slow / fast:.2f} |")
    return lines


def _seconds_each(row: dict[str, object]) -> float:
    """Decoding seconds per token after the first (which the prefill makes)."""
    return float(str(row["seconds"])) / max(1, int(str(row["tokens"])) - 1)


def _ratio(pairs: list[tuple[dict[str, object], dict[str, object]]]) -> str:
    values = np.array(
        [_seconds_each(slow) / _seconds_each(fast) for fast, slow in pairs if int(str(fast["tokens"])) > 1]
    )
    if not len(values):
        return ""
    picks = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))
    return f"{np.median(values):.2f} ({low:.2f} to {high:.2f})"


def report(args: argparse.Namespace) -> None:
    rows = known_rows()
    text = "\n".join([*acceptance_table(rows), "", *speed_table(rows)])
    print(text)
    if args.publish:
        publish("heads", text, "docs/results/heads.jsonl", environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("measure")
    runs.add_argument("arms", nargs="+", choices=list(ARMS))
    runs.add_argument("--questions", type=int, default=480)
    runs.add_argument("--batch", type=int, default=1)
    runs.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "spec_bench.jsonl")
    runs.set_defaults(run=measure)
    shows = commands.add_parser("report")
    shows.add_argument("--publish", action="store_true")
    shows.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
