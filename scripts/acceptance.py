"""Measure the acceptance figures of docs/benchmarks.md: tokens per pass of the target, no seconds.

    python scripts/acceptance.py rules|shapes|sampled|union|drafters [--data FILE.jsonl] [--train FILE.jsonl]

The draft is ``layer_skip`` with the searched subset that ships for the default model, unless a section says otherwise.
Nothing here depends on the clock (the controller is off), so other work on the machine does not change a figure. Raw
rows go to docs/results/NAME.json, the table between the markers of docs/benchmarks.md is replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from outrider.cli.reexec import ensure_allocator

if __name__ == "__main__":
    ensure_allocator()

import numpy as np
from benchmark import MODEL, ROOT, TOKENS, environment, groups_of, publish
from torch import Tensor

import outrider
from outrider.drafters.layer_skip import LayerSkip
from outrider.engine.acceptance import measure_acceptance
from outrider.engine.engine import Engine
from outrider.models.base import Segment
from outrider.types import Regime
from outrider.verifiers import acceptance as rules

DRAFT = "layer_skip"
NODES = 16
KS = (1, 2, 3, 4, 8)


def load(**parts: object) -> Engine:
    """The default model in bfloat16, controller off."""
    return outrider.load(MODEL, dtype="bfloat16", weights="bf16", adaptive=False, **parts)


def mean_interval(values: list[float], draws: int = 4000) -> tuple[float, float, float]:
    """Mean and bootstrap 95% interval (fixed seed)."""
    data = np.asarray(values)
    picks = np.random.default_rng(0).integers(len(data), size=(draws, len(data)))
    low, high = np.quantile(data[picks].mean(axis=1), (0.025, 0.975))
    return float(data.mean()), float(low), float(high)


def spelled(values: list[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


# -- the rules, on stored rows -----------------------------------------------------------------------------------


def rows_of(engine: Engine, texts: list[str], each: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(p, q) at ``each`` positions of a sampled answer; the draft sees the target's own prefix entries."""
    drafter = engine._lanes[Regime.SAMPLED].drafter
    assert isinstance(drafter, LayerSkip)
    sampled = outrider.SamplingParams(temperature=1.0, seed=1, max_tokens=each, ignore_eos=True)
    plain = engine.plain()
    for index, text in enumerate(texts):
        prompt = engine.encode(text)
        output = plain.generate(prompt, sampled).tokens
        pipeline = engine.pipeline(sampled, prompt)
        cache = engine.model.new_cache()
        engine.model.forward([Segment(cache, prompt, logit_rows=())])
        cache.commit(range(len(prompt)))
        for token in output:
            with cache.speculation():
                draft = engine.model.forward([Segment(cache, [token])], skip=drafter.skip)[0].logits[0]
            target = engine.model.forward([Segment(cache, [token])])[0].logits[0]
            cache.commit([0])
            yield pipeline.probabilities(target, ()), pipeline.probabilities(draft, ())
        report(index + 1, len(texts))


def section_rules(args: argparse.Namespace) -> tuple[str, object]:
    engine = load(drafter=DRAFT)
    texts = [text for rows in groups_of(args.data, 4).values() for text in rows]
    found: dict[str, dict[int, list[float]]] = {}
    above_optimum = below_multi_step = 0
    for p, q in rows_of(engine, texts, 40):
        without = rules.without_replacement_estimate(p, q, max(KS))
        for k in KS:
            figures = {
                "optimal_transport": rules.optimal(p, q, k),
                "k_seq": rules.k_sequential(p, q, k),
                "multi_step, drawn with replacement": rules.multi_step(p, q, k),
                "swor (multi_step, drawn without replacement)": without[k - 1],
                "sample_match, the k best of q": rules.sample_match(p, q, k),
            }
            for name, value in figures.items():
                found.setdefault(name, {}).setdefault(k, []).append(value)
            best = figures["optimal_transport"] + 1e-9
            above_optimum += (figures["k_seq"] > best) + (figures["multi_step, drawn with replacement"] > best)
            below_multi_step += (
                figures["swor (multi_step, drawn without replacement)"]
                < figures["multi_step, drawn with replacement"] - 1e-9
            )
    lines = ["| rule | " + " | ".join(f"k = {k}" for k in KS) + " |", "|---|" + "---|" * len(KS)]
    for name, by_k in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{np.mean(by_k[k]):.4f}" for k in KS) + " |")
    count = len(found["k_seq"][1])
    rising = sum(
        later < earlier - 1e-9
        for name in ("k_seq", "multi_step, drawn with replacement")
        for a, b in pairwise(KS)
        for earlier, later in zip(found[name][a], found[name][b], strict=True)
    )
    cells = count * len(KS)
    gap = [
        a - b
        for k in KS[1:]
        for a, b in zip(
            found["swor (multi_step, drawn without replacement)"][k],
            found["multi_step, drawn with replacement"][k],
            strict=True,
        )
    ]
    lines += [
        "",
        f"Mean probability that one of k guesses at a position is accepted: {count} positions of sampled answers to "
        f"{len(texts)} prompts, temperature 1.",
        "",
        f"- rows where `k_seq` or `multi_step` is above the optimum for the same draws: {above_optimum} of {2 * cells}",
        f"- rows where either falls with k: {rising} of {2 * count * (len(KS) - 1)}",
        f"- `swor` less `multi_step` with replacement, k >= 2: {spelled(gap)}; rows where the estimate of `swor` is "
        f"lower: {below_multi_step} of {cells}",
    ]
    rounded = {name: {k: [round(x, 4) for x in values] for k, values in by_k.items()} for name, by_k in found.items()}
    return "\n".join(lines), rounded


# -- shapes and verifiers, by decoding ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One configuration of a section."""

    label: str
    drafter: str
    shape: str | None
    temperature: float = 0.0
    proposal: str | None = None
    verifier: str | None = None


def tokens_per_pass(engine: Engine, prompts: list[list[int]], temperature: float) -> list[float]:
    """Tokens kept per decode step of the target, bonus token included, for every prompt."""
    found = []
    for index, prompt in enumerate(prompts):
        seed = None if temperature == 0.0 else 1000 + index
        params = outrider.SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True)
        stats = engine.generate(prompt, params).stats
        found.append((stats.output_tokens - stats.num_first_tokens) / stats.num_steps)
        report(index + 1, len(prompts))
    return found


def compare(engine: Engine, arms: list[Arm], prompts: list[list[int]]) -> dict[str, list[float]]:
    results = {}
    for arm in arms:
        one = engine.with_parts(
            drafter=arm.drafter, shape=arm.shape, proposal=arm.proposal, verifier=arm.verifier, adaptive=False
        )
        results[arm.label] = tokens_per_pass(one, prompts, arm.temperature)
        print(f"{arm.label}: {spelled(results[arm.label])}", file=sys.stderr)
    return results


def table(results: dict[str, list[float]]) -> list[str]:
    lines = ["| configuration | tokens per pass (95% interval of the mean) |", "|---|---|"]
    return lines + [f"| {label} | {spelled(values)} |" for label, values in results.items()]


def difference(results: dict[str, list[float]], first: str, second: str) -> str:
    gaps = [a - b for a, b in zip(results[first], results[second], strict=True)]
    return f"- {first}, less {second}: {spelled(gaps)}"


def vector_for(engine: Engine, args: argparse.Namespace, temperature: float, proposal: str) -> str:
    """An acceptance vector measured on prompts that the comparison does not use."""
    lines = args.train.read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:: max(1, len(lines) // 12)][:12]]
    params = outrider.SamplingParams(temperature=temperature, seed=5, max_tokens=TOKENS)
    star = engine.with_parts(drafter=DRAFT, shape="widths:8", proposal=proposal, adaptive=False)
    found = measure_acceptance(star, texts, params, 8, report)
    return "/".join(f"{share:.4f}" for share in found.vector)


def section_shapes(args: argparse.Namespace) -> tuple[str, object]:
    engine = load(drafter=DRAFT)
    prompts = [engine.encode(text) for rows in groups_of(args.data, 10).values() for text in rows]
    vector = vector_for(engine, args, 0.0, "deterministic")
    widths = ["widths:4,1,1,1", "widths:1,1,2,1,1,1,1,1,1"]
    best, optimal = f"best_first:{NODES}", f"sequoia:{NODES}"
    arms = [
        Arm("chain:4", DRAFT, "chain:4"),
        *(Arm(shape, DRAFT, shape) for shape in widths),
        Arm(best, DRAFT, best),
        Arm(optimal, DRAFT, f"{optimal},acceptance={vector}"),
    ]
    results = compare(engine, arms, prompts)
    lines = [
        f"60 prompts, {TOKENS} new tokens, temperature 0, bfloat16, draft `{DRAFT}` (searched subset), {NODES} guesses "
        f"a step but for the chain. Acceptance vector, measured on 12 training prompts: {vector}.",
        "",
        *table(results),
        "",
        "Paired differences, prompt by prompt:",
        "",
    ]
    lines += [difference(results, shape, other) for shape in (best, optimal) for other in widths]
    return "\n".join(lines), results


def section_sampled(args: argparse.Namespace) -> tuple[str, object]:
    engine = load(drafter=DRAFT)
    prompts = [engine.encode(text) for rows in groups_of(args.data, 10).values() for text in rows]
    drawn = "without_replacement"
    vector = vector_for(engine, args, 1.0, drawn)
    tree, best = f"sequoia:{NODES},acceptance={vector}", f"best_first:{NODES}"
    arms = [
        Arm(f"{best}, deterministic, sample_match", DRAFT, best, 1.0, "deterministic", "sample_match"),
        Arm(f"sequoia:{NODES}, drawn without replacement, multi_step", DRAFT, tree, 1.0, drawn, "multi_step"),
        Arm(f"sequoia:{NODES}, drawn without replacement, traversal", DRAFT, tree, 1.0, drawn, "traversal"),
        Arm("chain:6, drawn, multi_step", DRAFT, "chain:6", 1.0, "iid", "multi_step"),
        Arm("chain:6, drawn, block", DRAFT, "chain:6", 1.0, "iid", "block"),
    ]
    results = compare(engine, arms, prompts)
    names = [arm.label for arm in arms]
    lines = [
        f"60 prompts, {TOKENS} new tokens, temperature 1, bfloat16, draft `{DRAFT}` (searched subset). Acceptance "
        f"vector, measured on 12 training prompts: {vector}.",
        "",
        *table(results),
        "",
        "Paired differences, prompt by prompt:",
        "",
        difference(results, names[0], names[1]),
        difference(results, names[2], names[1]),
        difference(results, names[4], names[3]),
    ]
    return "\n".join(lines), results


def section_union(args: argparse.Namespace) -> tuple[str, object]:
    engine = load(drafter=DRAFT)
    prompts = [engine.encode(text) for rows in groups_of(args.data, 10).values() for text in rows]
    arms = [
        Arm("ngram, chain:8", "ngram", "chain:8"),
        Arm("layer_skip, chain:4", DRAFT, "chain:4"),
        Arm("ensemble of both", f"ensemble:ngram@chain:8+{DRAFT}@chain:4", None),
    ]
    results = compare(engine, arms, prompts)
    union = arms[2].label
    lines = [f"60 prompts, {TOKENS} new tokens, temperature 0.", "", *table(results), ""]
    lines += [difference(results, union, arm.label) for arm in arms[:2]]
    return "\n".join(lines), results


def section_drafters(args: argparse.Namespace) -> tuple[str, object]:
    engine = load(drafter=DRAFT)
    groups = groups_of(args.data, 4)
    prompts = [engine.encode(text) for rows in groups.values() for text in rows]
    arms = [
        Arm("ngram, chain:8", "ngram", "chain:8"),
        Arm("suffix, chain:8", "suffix", "chain:8"),
        Arm("suffix, best_first:16", "suffix", "best_first:16"),
        Arm("lookahead", "lookahead", None),
        Arm("layer_skip, chain:4", DRAFT, "chain:4"),
        Arm("layer_skip, pacer:8", DRAFT, "pacer:8"),
        Arm("ensemble ngram + layer_skip", f"ensemble:ngram@chain:8+{DRAFT}@chain:4", None),
    ]
    results = compare(engine, arms, prompts)
    names = list(groups)
    lines = [
        f"24 prompts (four of each group), {TOKENS} new tokens, temperature 0: tokens per pass of the target.",
        "",
        "| configuration | all | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for label, values in results.items():
        groups_means = [np.mean(values[4 * i : 4 * i + 4]) for i in range(len(names))]
        lines.append(f"| {label} | {np.mean(values):.2f} | " + " | ".join(f"{v:.2f}" for v in groups_means) + " |")
    return "\n".join(lines), results


def report(done: int, total: int) -> None:
    print(f"\r{done}/{total}  ", end="\n" if done == total else "", file=sys.stderr, flush=True)


SECTIONS: dict[str, Callable[[argparse.Namespace], tuple[str, object]]] = {
    "rules": section_rules,
    "shapes": section_shapes,
    "sampled": section_sampled,
    "union": section_union,
    "drafters": section_drafters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    data = ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data / "spec_bench.jsonl")
    parser.add_argument("--train", type=Path, default=data / "train_prompts.jsonl")
    args = parser.parse_args()
    for path in (args.data, args.train):
        if not path.exists():
            parser.error(f"no prompts at {path}; give --data and --train")
    for name in args.sections:
        where = environment()
        text, raw = SECTIONS[name](args)
        print(f"\n## {name}\n{text}\n")
        publish(name, text, raw, where)


if __name__ == "__main__":
    main()
