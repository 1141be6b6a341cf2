"""What a seed promises. (That it changes nothing at temperature 0 is in ``test_documented.py``.)"""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, random_prompts
from outrider.sampling.params import SamplingParams


@pytest.mark.parametrize("drafter", ["none", "ngram:min_match=1", "small_model", "layer_skip", "suffix"])
def test_seeds_alone_or_with_neighbours_u26(drafter: str) -> None:
    """A request's seed was ignored once other requests shared its batch.

    Seed 42 gives the same tokens alone and with three neighbours, seeded, unseeded or greedy, wherever it stands.
    """
    engine = build_engine(drafter, "widths:2,2")
    prompts = random_prompts(4, 12, seed=26)
    asked = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=42, ignore_eos=True)
    others = [asked.model_copy(update=change) for change in ({"seed": 42}, {"seed": None}, {"temperature": 0.0})]
    alone = engine.generate(prompts[0], asked).tokens
    assert alone != engine.generate(prompts[0], asked.model_copy(update={"seed": 43})).tokens
    requests = [("asked", prompts[0], asked), *zip(range(3), prompts[1:], others, strict=True)]
    for turn in range(4):
        results = dict(engine.run([*requests[turn:], *requests[:turn]], batch=4))
        assert results["asked"].tokens == alone
