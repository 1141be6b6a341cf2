"""Measure how far the target's logits move with the number of rows in a forward (docs/guarantees.md).

    python scripts/kernel_gap.py

For each format: the same 24 positions of 24 prompts, evaluated one row at a time and eight rows at a time; prints the
median and the largest difference of a logit, and of the distance between the two best logits.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.reexec import ensure_allocator

ensure_allocator()

import torch  # noqa: E402

import outrider  # noqa: E402
from outrider.models.base import Segment  # noqa: E402

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "spec_bench_24.jsonl"
ROWS = 24


def main() -> None:
    texts = [json.loads(line)["turns"][0] for line in SAMPLE.read_text().splitlines()]
    for dtype, weights in (("float32", "auto"), ("bfloat16", "bf16"), ("bfloat16", "int4")):
        engine = outrider.load("smollm2-135m", drafter="none", dtype=dtype, weights=weights)
        model = engine.model
        moves, gaps = [], []
        for text in texts:
            prompt = engine.encode(text)
            cache = model.new_cache()
            model.forward([Segment(cache, prompt[:-ROWS], logit_rows=())])
            cache.commit(range(cache.scratch))
            many, few = [], []
            for start in range(-ROWS, 0, 8):
                tokens = prompt[start : start + 8 or None]
                many.append(model.forward([Segment(cache, tokens)])[0].logits.double())
                cache.rollback()
                for token in tokens:
                    few.append(model.forward([Segment(cache, [token])])[0].logits.double())
                    cache.commit([0])
            a, b = torch.cat(few), torch.cat(many)
            moves.append((a - b).abs().amax(dim=-1))
            best = a.topk(2, dim=-1).indices
            gap_few, gap_many = (t.gather(1, best).diff(dim=-1) for t in (a, b))
            gaps.append((gap_few - gap_many).abs().flatten())
        move, gap = torch.cat(moves), torch.cat(gaps)
        print(
            f"{dtype} {weights}: {len(move)} positions, largest move of any logit: "
            f"median {move.median():.2g}, max {move.max():.2g}; "
            f"move of the best two's distance: median {gap.median():.2g}, max {gap.max():.2g}"
        )


if __name__ == "__main__":
    main()
