"""What every step did: its tree, what was accepted, where the time went. ``python examples/step_records.py [MODEL]``.

``replay`` offers the target's own best token with the probability that it is given, so there is something to see on
any model.
"""

from __future__ import annotations

import sys

import outrider


def main(model: str = "toy") -> None:
    engine = outrider.load(model, drafter="replay:0.7", shape="widths:2,2,1", adaptive=False)
    result = engine.generate("Tell me about the sea.", outrider.SamplingParams(max_tokens=24, ignore_eos=True))
    for number, record in enumerate(result.records):
        kept = [engine.tokenizer.readable(token) for token in record.emitted]
        print(f"step {number} ({record.phase}, {1000 * record.times.total:.1f} ms): kept {kept}")
        for node in range(1, len(record.tokens)):
            mark = "+" if node in record.accepted_path else "-"
            parent, text = record.parents[node], engine.tokenizer.readable(record.tokens[node])
            print(f"    {mark} node {node} below {parent}: {text!r} from {record.sources[node]}")
    print(f"{result.stats.num_accepted_tokens} of {result.stats.num_draft_tokens} guesses accepted")


if __name__ == "__main__":
    main(*sys.argv[1:2])
