"""An answer while it is found, its figures, and plain decoding's answer: ``python examples/generate.py [MODEL]``.

The toy model's text is random, so n-grams find nothing there; try ``smollm2-135m``.
"""

from __future__ import annotations

import sys

import outrider


def main(model: str = "toy") -> None:
    engine = outrider.load(model, drafter="ngram", shape="chain:6")
    params = outrider.SamplingParams(max_tokens=64, ignore_eos=True)
    prompt = engine.encode("one two three, one two three, one two")
    for event in engine.stream(prompt, params):
        print(event.text, end="", flush=True)
        if event.result is not None:
            stats = event.result.stats
            print(f"\n\n{stats.output_tokens} tokens in {stats.num_steps} steps after the prompt's")
            print(f"mean acceptance length {stats.mean_acceptance_length:.2f}, {stats.tokens_per_second:.0f} tokens/s")
            plain = engine.plain().generate(prompt, params)
            print(outrider.compare_outputs(engine, prompt, event.result.tokens, plain.tokens).describe())


if __name__ == "__main__":
    main(*sys.argv[1:2])
