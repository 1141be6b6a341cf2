"""Many prompts, a few at a time: a place that becomes free is filled at once. ``python examples/batch.py [MODEL]``."""

from __future__ import annotations

import sys

import outrider
from outrider.engine.stats import fold

PROMPTS = ("Name three rivers.", "Count to five.", "What is a lens.", "Say hello.", "Where is the moon.")


def main(model: str = "toy") -> None:
    engine = outrider.load(model, drafter="ngram")
    # A seed gives each request the draws that it would have alone; different requests get different seeds.
    requests = [
        (prompt, prompt, outrider.SamplingParams(temperature=0.8, seed=number, max_tokens=24, ignore_eos=True))
        for number, prompt in enumerate(PROMPTS)
    ]
    results = []
    for prompt, result in engine.run(requests, batch=3):
        print(f"{prompt!r} -> {result.text!r} ({result.finish_reason.value})")
        results.append(result)
    records = [record for result in results for record in result.records]
    stats = fold(records, sum(result.prompt_tokens for result in results))
    print(f"{stats.output_tokens} tokens, mean acceptance length {stats.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
