"""Measure the figures of docs/benchmarks.md and write them there.

    python scripts/benchmark.py plain|int4|rows|overhead|ngram|sweep [--data spec_bench.jsonl] [--llama-python PYTHON]

Every section interleaves what it compares (A B A B), prompt by prompt, in this one process (llama.cpp in a child that
is stopped while others run), and reports medians. Raw rows go to docs/results/NAME.json; the table between the
markers of docs/benchmarks.md is replaced. Run it with nothing else running: the load average
at the start is part of the record.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outrider.cli.reexec import ensure_allocator

if __name__ == "__main__":
    ensure_allocator()

import torch
from peers import LlamaCpp, Timing, Transformers

import outrider
from outrider.audit.sweep import greedy_sweep
from outrider.engine.engine import Engine
from outrider.models.base import Segment
from outrider.models.decoder import Decoder
from outrider.models.gguf import GGUFCheckpoint
from outrider.models.operations import TorchOperations
from outrider.models.store import pull

ROOT = Path(__file__).resolve().parents[1]
FIVE = ("translation", "summarization", "qa", "math_reasoning", "rag")
TOKENS = 64
MODEL = "smollm2-135m"


def groups_of(path: Path, each: int) -> dict[str, list[str]]:
    """First turns of ``each`` questions, evenly spaced, from each of Spec-Bench's six groups."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        group = row["category"] if row["category"] in FIVE else "mt_bench"
        found.setdefault(group, []).append(row["turns"][0])
    return {name: rows[:: max(1, len(rows) // each)][:each] for name, rows in sorted(found.items())}


def params(count: int = TOKENS) -> outrider.SamplingParams:
    return outrider.SamplingParams(max_tokens=count, ignore_eos=True)


def our_timing(engine: Engine, prompt: list[int]) -> Timing:
    """Wall clock of a generation as a caller sees it, engine overhead included."""
    started = time.perf_counter()
    result = engine.generate(prompt, params())
    total = time.perf_counter() - started
    return Timing(result.tokens, result.stats.prefill_seconds, total)


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """Bootstrap 95% interval of the median (fixed seed)."""
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor(values, dtype=torch.float64)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)
    medians = data[picks].median(dim=1).values
    return float(medians.quantile(0.025)), float(medians.quantile(0.975))


def ratio(label: str, ours: list[float], theirs: list[float]) -> str:
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(paired)
    return f"{label}: median paired ratio {statistics.median(paired):.2f} (95% interval {low:.2f} to {high:.2f})"


def versus(
    prompts: list[list[int]], ours: Callable[[list[int]], Timing], theirs: Callable[[list[int]], Timing]
) -> tuple[list[Timing], list[Timing]]:
    """Both on every prompt, in turn; the first prompt is run once more beforehand as a warm-up."""
    for run in (ours, theirs):
        run(prompts[0])
    pairs = []
    for index, prompt in enumerate(prompts):
        pairs.append((ours(prompt), theirs(prompt)))
        print(f"\r{index + 1}/{len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [a for a, _ in pairs], [b for _, b in pairs]


def peer_table(name: str, peer: str, ours: list[Timing], theirs: list[Timing]) -> str:
    lines = ["| engine | decode tokens/s | end to end tokens/s |", "|---|---|---|"]
    for label, rows in ((name, ours), (peer, theirs)):
        decode = statistics.median(r.decode_rate for r in rows)
        lines.append(f"| {label} | {decode:.1f} | {statistics.median(r.end_to_end_rate for r in rows):.1f} |")
    same = sum(
        next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), TOKENS)
        for a, b in zip(ours, theirs, strict=True)
    )
    lines += [
        "",
        "- " + ratio("decode", [r.decode_rate for r in ours], [r.decode_rate for r in theirs]),
        "- " + ratio("end to end", [r.end_to_end_rate for r in ours], [r.end_to_end_rate for r in theirs]),
        f"- tokens equal before the first difference: {same} of {TOKENS * len(ours)}",
    ]
    return "\n".join(lines)


def section_plain(args: argparse.Namespace) -> tuple[str, object]:
    engine = outrider.load(MODEL, drafter="none", dtype="bfloat16", weights="bf16")
    peer = Transformers(GGUFCheckpoint(pull(MODEL)), torch.bfloat16)
    prompts = [engine.encode(text) for rows in groups_of(args.sample, 4).values() for text in rows]
    ours, theirs = versus(prompts, lambda p: our_timing(engine, p), lambda p: peer.run(p, TOKENS))
    import transformers

    table = peer_table("Outrider, plain, bfloat16", f"transformers {transformers.__version__}, bfloat16", ours, theirs)
    return table, [(a.__dict__, b.__dict__) for a, b in zip(ours, theirs, strict=True)]


def section_int4(args: argparse.Namespace) -> tuple[str, object]:
    if args.llama_python is None:
        sys.exit("int4 needs --llama-python PYTHON: the interpreter of an environment with llama-cpp-python")
    engine = outrider.load(MODEL, drafter="none", dtype="bfloat16", weights="int4")
    peer = LlamaCpp(args.llama_python, str(pull(MODEL)), torch.get_num_threads())
    prompts = [engine.encode(text) for rows in groups_of(args.sample, 4).values() for text in rows]
    try:
        ours, theirs = versus(prompts, lambda p: our_timing(engine, p), lambda p: peer.run(p, TOKENS))
    finally:
        peer.close()
    name = f"llama.cpp (llama-cpp-python {peer.version}), Q4_1"
    table = peer_table("Outrider, plain, int4 weights of the same file", name, ours, theirs)
    return table, [(a.__dict__, b.__dict__) for a, b in zip(ours, theirs, strict=True)]


def section_rows(args: argparse.Namespace) -> tuple[str, object]:
    counts = [1, 2, 4, 8, 16, 32, 64]
    formats = {
        "bfloat16": ("bfloat16", "bf16"),
        "bfloat16, torch's small operations": ("bfloat16", "bf16"),
        "int4": ("bfloat16", "int4"),
        "float32": ("float32", "auto"),
    }
    lines = ["| format | " + " | ".join(f"{n} rows" for n in counts) + " | 8 rows / 1 row |"]
    lines.append("|---|" + "---|" * (len(counts) + 1))
    raw = {}
    for label, (dtype, weights) in formats.items():
        model = outrider.load(MODEL, drafter="none", dtype=dtype, weights=weights).model
        assert isinstance(model, Decoder)
        if "torch" in label:
            model.operations = TorchOperations(model.config)
        cache = model.new_cache()
        tokens = torch.randint(49000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
        model.forward([Segment(cache, tokens, logit_rows=())])
        cache.commit(range(len(tokens)))
        seconds: dict[int, list[float]] = {n: [] for n in counts}
        for repeat in range(31):
            for n in counts:
                started = time.perf_counter()
                model.forward([Segment(cache, tokens[:n])])
                if repeat:  # the first round warms up
                    seconds[n].append(time.perf_counter() - started)
                cache.rollback()
        medians = {n: statistics.median(values) * 1000 for n, values in seconds.items()}
        raw[label] = medians
        lines.append(
            f"| {label} | " + " | ".join(f"{medians[n]:.1f}" for n in counts) + f" | {medians[8] / medians[1]:.2f} |"
        )
    return (
        "Milliseconds of one forward over a prefix of 256 tokens (median of 30 interleaved repeats).\n\n"
        + "\n".join(lines),
        raw,
    )


def section_overhead(args: argparse.Namespace) -> tuple[str, object]:
    lines = ["| weights | draft | target | verify | other | outside target and draft |", "|---|---|---|---|---|---|"]
    raw = {}
    for weights in ("bf16", "int4"):
        engine = outrider.load(MODEL, drafter="ngram", dtype="bfloat16", weights=weights)
        results = [
            engine.generate(engine.encode(text), params()).stats
            for rows in groups_of(args.sample, 4).values()
            for text in rows
        ]
        draft = sum(s.draft_seconds for s in results)
        target = sum(s.target_seconds for s in results)
        verify = sum(s.verify_seconds for s in results)
        other = sum(s.other_seconds for s in results)
        total = draft + target + verify + other
        raw[weights] = {"draft": draft, "target": target, "verify": verify, "other": other}
        shares = " | ".join(f"{100 * value / total:.1f}%" for value in (draft, target, verify, other))
        lines.append(f"| {weights} | {shares} | {100 * (verify + other) / total:.1f}% |")
    return "Shares of the decode time, n-gram drafter, 24 prompts.\n\n" + "\n".join(lines), raw


def section_ngram(args: argparse.Namespace) -> tuple[str, object]:
    lines = [
        "| weights | category | plain tokens/s | n-gram tokens/s | ratio (95% interval) | acceptance length |",
        "|---|---|---|---|---|---|",
    ]
    raw = []
    for weights in ("bf16", "int4"):
        fast = outrider.load(MODEL, drafter="ngram", dtype="bfloat16", weights=weights)
        plain = fast.plain()
        for category, texts in groups_of(args.data, 10).items():
            prompts = [plain.encode(text) for text in texts]
            pairs = []
            lengths = []
            for prompt in [prompts[0], *prompts]:
                a = fast.generate(prompt, params())
                b = plain.generate(prompt, params())
                pairs.append((a.stats.tokens_per_second, b.stats.tokens_per_second))
                lengths.append(a.stats.mean_acceptance_length)
                raw.append((weights, category, *pairs[-1], lengths[-1]))
            pairs, lengths = pairs[1:], lengths[1:]
            paired = [x / y for x, y in pairs]
            low, high = interval(paired)
            lines.append(
                f"| {weights} | {category} | {statistics.median(y for _, y in pairs):.1f} | "
                f"{statistics.median(x for x, _ in pairs):.1f} | "
                f"{statistics.median(paired):.2f} ({low:.2f} to {high:.2f}) | {statistics.mean(lengths):.2f} |"
            )
            print(lines[-1], file=sys.stderr)
    return "Ten prompts of each group, 64 new tokens, decode rates, interleaved.\n\n" + "\n".join(lines), raw


SWEEP = [
    ("ngram", "chain:8"),
    ("ngram", "widths:3,1,1,1"),
    ("layer_skip:24", "chain:3"),
    ("layer_skip:24", "widths:2,2,1"),
    ("replay:0.8", "chain:6"),
    ("replay:0.6", "widths:2,2,1"),
    ("small_model", "chain:4"),
    ("small_model", "widths:2,2,1"),
]


def sweep_combinations() -> tuple[Engine, list[tuple[Engine, str, str]]]:
    """The plain float32 engine, and every combination of the sweep on the same target."""
    base = outrider.load(MODEL, drafter="none", dtype="float32")
    paired = outrider.load(MODEL, drafter="small_model", draft_model=MODEL, dtype="float32", adaptive=False)
    combinations = []
    for drafter, shape in SWEEP:
        source = paired if drafter == "small_model" else base
        combinations.append((source.with_parts(drafter=drafter, shape=shape, adaptive=False), drafter, shape))
    return base, combinations


def section_sweep(args: argparse.Namespace) -> tuple[str, object]:
    base, combinations = sweep_combinations()
    prompts = [base.encode(text) for rows in groups_of(args.data, 10).values() for text in rows]
    started = time.perf_counter()

    def report(done: int, total: int) -> None:
        left = (time.perf_counter() - started) / done * (total - done)
        print(f"\r{done}/{total} prompts, {left:.0f} s left  ", end="", file=sys.stderr, flush=True)

    rows = greedy_sweep(base, prompts, combinations, TOKENS, report)
    lines = [
        "| drafter | shape | prompts | tokens | equal | drafted | accepted | near ties (largest gap) | unexplained |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    raw = []
    for row in rows:
        gaps = [c.gap or 0.0 for _, c in row.near_ties]
        near = f"{len(gaps)} ({max(gaps):.1e})" if gaps else "0"
        lines.append(
            f"| {row.drafter} | {row.shape} | {row.prompts} | {row.tokens} | {row.equal_tokens} | {row.drafted} | "
            f"{row.accepted} | {near} | {len(row.unexplained)} |"
        )
        raw.append({"drafter": row.drafter, "shape": row.shape, "tokens": row.tokens, "equal": row.equal_tokens})
        raw[-1]["near_ties"] = [(i, c.position, c.gap) for i, c in row.near_ties]
        raw[-1]["unexplained"] = [(i, c.position, c.gap) for i, c in row.unexplained]
    title = f"{len(prompts)} prompts, at most {TOKENS} new tokens, float32, against plain greedy decoding.\n\n"
    return title + "\n".join(lines), raw


SECTIONS = {
    "plain": section_plain,
    "int4": section_int4,
    "rows": section_rows,
    "overhead": section_overhead,
    "ngram": section_ngram,
    "sweep": section_sweep,
}


def environment() -> dict[str, object]:
    """Where a figure was measured."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": revision.stdout.strip(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "command": " ".join(sys.argv),
    }


def publish(name: str, table: str, raw: object, where: dict[str, object]) -> None:
    """Write the raw rows and put the table between the markers of docs/benchmarks.md."""
    results = ROOT / "docs" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps({"environment": where, "rows": raw}, indent=1) + "\n")
    note = (
        f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}, {where['date']}, "
        f"revision {where['revision']}, load at start {where['load_at_start']}"
    )
    page = ROOT / "docs" / "benchmarks.md"
    text = page.read_text()
    begin, end = f"<!-- measured:{name}:begin -->", f"<!-- measured:{name}:end -->"
    head, _, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n{table}\n\n*{note}*\n{end}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--all", action="store_true", help="every section whose peers are given")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "spec_bench.jsonl")
    parser.add_argument("--sample", type=Path, default=ROOT / "tests" / "data" / "spec_bench_24.jsonl")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python installed")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    if not args.data.exists() and (args.all or {"ngram", "sweep"} & set(args.sections)):
        parser.error(f"no Spec-Bench questions at {args.data}; give --data PATH")
    names = [n for n in SECTIONS if n != "int4" or args.llama_python] if args.all else args.sections
    for name in names:
        where = environment()
        table, raw = SECTIONS[name](args)
        print(f"\n## {name}\n{table}\n")
        publish(name, table, raw, where)


if __name__ == "__main__":
    main()
