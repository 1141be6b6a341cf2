"""Measure trained heads on Spec-Bench: tokens per pass of the target, and seconds against plain decoding.

    python scripts/heads.py measure ARM [ARM ...] [--questions 480] [--batch 1] [--data FILE.jsonl]
    python scripts/heads.py replay ARM [ARM ...] [--questions 480]
    python scripts/heads.py report

``measure`` answers the first turn of every question (up to 128 new tokens, default model, bfloat16) with each arm in
turn, question by question (A B A B), and appends one row per answer to docs/results/heads.jsonl; rows that exist are
skipped, so a run that was stopped goes on. ``--questions 120`` takes every fourth question of each group. Arms timed
together must run with ``--batch 1`` and nothing else on the machine: the load average is in every row. ``--batch 16``
decodes that many questions at once, for acceptance only (its rows carry no seconds).

``replay`` counts a greedy arm's acceptance without decoding again: greedy text does not depend on the drafter, so the
target answers every question once, plainly in bfloat16, and each drafter then guesses along that text with the hidden
states of one pass over it. A guess is accepted when the text continues so. ``report`` writes the tables of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.cli.reexec import ensure_allocator

if __name__ == "__main__":
    ensure_allocator()

import numpy as np
from benchmark import FIVE, MODEL, ROOT, environment, publish

import outrider
from outrider.engine.engine import Engine
from outrider.engine.recorded import guess_along
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
    adaptive: bool = False

    def engine(self) -> Engine:
        return outrider.load(
            MODEL,
            drafter=self.drafter,
            shape=self.shape,
            draft_model=self.draft_model,
            verifier=self.verifier,
            dtype="bfloat16",
            weights=self.weights,
            adaptive=self.adaptive,
        )


TREE = "best_first:32,preset=eagle2"
ARMS = {
    # Timed: plain decoding and what the command line does by default, with the fastest weights and the controller on.
    "plain": Arm(),
    "default": Arm("auto", adaptive=True),
    "plain-t1": Arm(temperature=1.0),
    "default-t1": Arm("auto", temperature=1.0),
    # Acceptance, bfloat16.
    "plain-bf16": Arm(weights="bf16"),
    "eagle3": Arm("eagle3", TREE, weights="bf16"),
    "eagle3-16": Arm("eagle3", "best_first:16,preset=eagle2", weights="bf16"),
    "eagle3-chain": Arm("eagle3", "chain:7", weights="bf16"),
    "eagle3-t1": Arm("eagle3", "widths:4,2,1,1", temperature=1.0, weights="bf16"),
    "eagle3-chain-t1": Arm("eagle3", "chain:5", temperature=1.0, weights="bf16"),
    "ngram": Arm("ngram", weights="bf16"),
    "suffix": Arm("suffix", weights="bf16"),
    "default-bf16": Arm("auto", weights="bf16"),
    "eagle3+ngram": Arm("ensemble:(eagle3@best_first:16,preset=eagle2)+ngram", weights="bf16"),
    "eagle": Arm("eagle", TREE, weights="bf16"),
    "eagle-chain": Arm("eagle", "chain:7", weights="bf16"),
    "medusa": Arm("medusa", weights="bf16"),
    "hydra": Arm("hydra", weights="bf16"),
    "mtp": Arm("mtp", TREE, weights="bf16"),
    "layer_skip-exit": Arm("layer_skip:head=auto", weights="bf16"),
    "boost-1": Arm("small_model", "best_first:16", draft_model="smollm2-135m-draft-1", weights="bf16"),
    "boost-2": Arm("small_model", "best_first:16", draft_model="smollm2-135m-draft-2", weights="bf16"),
    "boost-1+2": Arm(
        "ensemble:(small_model@best_first:16)+(small_model@best_first:16),budget=16",
        draft_model="smollm2-135m-draft-1,smollm2-135m-draft-2",
        weights="bf16",
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
        "passes": stats.num_steps,
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


# -- replay --------------------------------------------------------------------------------------------------------

ANSWERS = ROOT / "docs" / "results" / "heads-answers.json"  # token ids by question number; not committed
_ANSWER_BATCH = 24


def replay(args: argparse.Namespace) -> None:
    for name in args.arms:
        refuse_unreplayable(name)
    questions = questions_of(args.data, args.questions)
    answers = _plain_answers(questions)
    done = {(row["arm"], row["question"]) for row in known_rows()}
    with ROWS.open("a") as file:
        for name in args.arms:
            engine = ARMS[name].engine()
            for question in questions:
                answer = answers[question.number]
                if (name, question.number) not in done and len(answer) > 1:
                    counts = asdict(guess_along(engine, engine.encode(question.text), answer, NEW_TOKENS))
                    row = {"arm": name, "question": question.number, "group": question.group, "tokens": len(answer)}
                    file.write(json.dumps({**row, **counts, "seconds": None, "is_replayed": True}) + "\n")
                    file.flush()
                    print(f"\r{name} {question.number}   ", end="", file=sys.stderr)
    print(file=sys.stderr)


def refuse_unreplayable(name: str) -> None:
    """Only guesses that depend on the text alone can be replayed along bfloat16 answers.

    Raises:
        SystemExit: saying why not.
    """
    arm = ARMS[name]
    reasons = {
        "it samples": arm.temperature > 0,
        "its weights are not bfloat16": arm.weights != "bf16",
        "the controller's clock would decide": arm.adaptive,
        "it drafts with the target's own cache": "layer_skip" in arm.drafter,
    }
    for reason, holds in reasons.items():
        if holds:
            raise SystemExit(f"{name} cannot be replayed: {reason}; use measure")


def _plain_answers(questions: list[Question]) -> dict[int, list[int]]:
    """The target's greedy answers, from the file or made now."""
    known = {int(k): v for k, v in json.loads(ANSWERS.read_text()).items()} if ANSWERS.exists() else {}
    missing = [question for question in questions if question.number not in known]
    if missing:
        engine = ARMS["plain-bf16"].engine()
        requests = ((q, q.text, params_of(ARMS["plain-bf16"], q)) for q in missing)
        for question, result in engine.run(requests, batch=_ANSWER_BATCH):
            assert isinstance(question, Question)
            known[question.number] = list(result.tokens)
            print(f"\rplain answers: {len(known)}", end="", file=sys.stderr)
        ANSWERS.write_text(json.dumps(known))
    return known


# -- the tables ----------------------------------------------------------------------------------------------------


def acceptance_table(rows: list[dict[str, object]]) -> list[str]:
    """Tokens per pass of the target behind the prompt, its own token included, by group: all tokens over all passes."""
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
    tokens = sum(int(str(row["tokens"])) - 1 for row in rows)
    return f"{tokens / passes:.2f}" if passes else ""


def speed_table(rows: list[dict[str, object]]) -> list[str]:
    """Decoding tokens per second against plain decoding: median of the paired ratios (bootstrap 95%), and all tokens by
    all seconds of a group."""
    by_key = {(row["arm"], row["question"]): row for row in rows if row["seconds"]}
    lines = [
        "| arm | " + " | ".join(GROUPS) + " | all |",
        "|---|" + "---|" * (len(GROUPS) + 1),
    ]
    for name, arm in ARMS.items():
        base = "plain-t1" if arm.temperature else "plain-bf16" if arm.weights == "bf16" else "plain"
        pairs = [(row, by_key[base, q]) for (a, q), row in by_key.items() if a == name and (base, q) in by_key]
        if not pairs or name == base:
            continue
        cells = [_ratio([p for p in pairs if p[0]["group"] == group]) for group in GROUPS]
        totals = [_total(pairs, group) for group in (*GROUPS, None)]
        lines.append(f"| {name}, median | " + " | ".join(cells) + f" | {_ratio(pairs)} |")
        lines.append(f"| {name}, all time | " + " | ".join(totals) + " |")
    return lines


def _seconds_each(row: dict[str, object]) -> float:
    """Decoding seconds per token after the first (which the prefill makes)."""
    return float(str(row["seconds"])) / max(1, int(str(row["tokens"])) - 1)


def _total(pairs: list[tuple[dict[str, object], dict[str, object]]], group: str | None) -> str:
    mine = [pair for pair in pairs if group in (None, pair[0]["group"])]
    rates = []
    for side in (0, 1):
        seconds = sum(float(str(pair[side]["seconds"])) for pair in mine)
        rates.append(sum(int(str(pair[side]["tokens"])) - 1 for pair in mine) / seconds if seconds else 0.0)
    return f"{rates[0] / rates[1]:.2f}" if rates[1] else ""


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
    again = commands.add_parser("replay")
    again.add_argument("arms", nargs="+", choices=list(ARMS))
    again.add_argument("--questions", type=int, default=480)
    again.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "spec_bench.jsonl")
    again.set_defaults(run=replay)
    shows = commands.add_parser("report")
    shows.add_argument("--publish", action="store_true")
    shows.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
