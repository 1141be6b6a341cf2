"""Measure how far the target's logits move with the number of rows in a forward (docs/guarantees.md).

    python scripts/kernel_gap.py

For each format: the same 24 positions of 24 prompts, evaluated one row at a time and eight or twelve rows at a time;
prints the median and the largest difference of a logit, and of the distance between the two best logits.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.reexec import ensure_allocator

ensure_allocator()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import outrider  # noqa: E402
from outrider.models.base import LanguageModel, Segment  # noqa: E402

SAMPLE = Path(__file__).resolve().parents[1] / "tests" / "data" / "spec_bench_24.jsonl"
ROWS = 24


def main() -> None:
    texts = [json.loads(line)["turns"][0] for line in SAMPLE.read_text().splitlines()]
    for dtype, weights in (("float32", "auto"), ("bfloat16", "bf16"), ("bfloat16", "int4")):
        engine = outrider.load("smollm2-135m", drafter="none", dtype=dtype, weights=weights)
        prompts = [engine.encode(text) for text in texts]
        alone = torch.cat([logits_of(engine.model, prompt, 1) for prompt in prompts])
        best = alone.topk(2, dim=-1).indices
        for rows in (8, 12):
            together = torch.cat([logits_of(engine.model, prompt, rows) for prompt in prompts])
            move = (alone - together).abs().amax(dim=-1)
            gap_alone, gap_together = (t.gather(1, best).diff(dim=-1) for t in (alone, together))
            gap = (gap_alone - gap_together).abs().flatten()
            print(
                f"{dtype} {weights}, 1 row against {rows}: {len(move)} positions, largest move of any logit: "
                f"median {move.median():.2g}, max {move.max():.2g}; "
                f"move of the best two's distance: median {gap.median():.2g}, max {gap.max():.2g}"
            )


def logits_of(model: LanguageModel, prompt: list[int], rows: int) -> Tensor:
    """Logits float64 [ROWS, vocabulary] of the prompt's last tokens, ``rows`` of them a pass."""
    cache, found = model.new_cache(), []
    model.forward([Segment(cache, prompt[:-ROWS], logit_rows=())])
    cache.commit(range(cache.scratch))
    for start in range(-ROWS, 0, rows):
        tokens = prompt[start : start + rows or None]
        found.append(model.forward([Segment(cache, tokens)])[0].logits.double())
        cache.commit(range(len(tokens)))
    return torch.cat(found)


if __name__ == "__main__":
    main()
