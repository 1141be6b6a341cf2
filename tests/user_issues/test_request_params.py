"""Parameters that were ignored by verification. (``tests/sampling/test_params.py`` holds the short file name.)"""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, distance, engine_law, letters_tokenizer
from outrider.engine.engine import Engine
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from user_issues.toy_decoding import chain_law

ROWS = [[0.1, 0.4, 0.2, 0.3], [0.35, 0.05, 0.35, 0.25], [0.3, 0.3, 0.1, 0.3], [0.25, 0.15, 0.5, 0.1]]
OPINION = [[0.3, 0.2, 0.4, 0.1], [0.2, 0.3, 0.1, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25] * 4]


def engine(shape: str) -> Engine:
    """A target and a draft model of four tokens that disagree."""
    target, draft = ToyModel.from_table(ROWS), ToyModel.from_table(OPINION)
    return build_engine("small_model", shape, target=target, draft=draft, tokenizer=letters_tokenizer(4, False))


def by_hand(temperature: float, top_p: float = 1.0) -> list[list[float]]:
    """The rows after temperature and top-p, with nothing but arithmetic."""
    found = []
    for row in ROWS:
        powered = [p ** (1 / temperature) for p in row]
        warm = [p / sum(powered) for p in powered]
        order = sorted(range(4), key=lambda token: -warm[token])
        before = {token: sum(warm[other] for other in order[:rank]) for rank, token in enumerate(order)}
        kept = [warm[token] if before[token] < top_p else 0.0 for token in range(4)]
        found.append([p / sum(kept) for p in kept])
    return found


@pytest.mark.parametrize(("shape", "depth"), [("chain:2", 2), ("widths:2,1", 1)])
def test_params_reach_the_targets_side_u17(monkeypatch: pytest.MonkeyPatch, shape: str, depth: int) -> None:
    """Temperature and top-p were applied to the draft only; the target's raw probabilities judged the guesses.

    With T = .3 and top_p = .9 the law of the output is that of the transformed p, far from the raw one.
    """
    params = SamplingParams(temperature=0.3, top_p=0.9, max_tokens=depth + 2)
    law, accepted = engine_law(monkeypatch, engine(shape), [0], params)
    assert accepted == depth
    assert distance(law, chain_law(by_hand(0.3, 0.9), 0, depth + 2)) < 1e-12
    assert distance(law, chain_law(ROWS, 0, depth + 2)) > 0.3


def test_params_temperature_has_an_effect_u18() -> None:
    """The speculative sampler filtered, then took the best token: temperature did nothing.

    300 seeds give several tokens at every position, in the proportions of the temperature.
    """
    fast = engine("widths:2,1")
    for temperature in (0.4, 1.5):
        params = SamplingParams(temperature=temperature, top_k=3, max_tokens=3)
        requests = [(seed, [3], params.model_copy(update={"seed": seed})) for seed in range(300)]
        outputs = [result.tokens for _, result in fast.run(requests, batch=30)]
        assert all(len({tokens[position] for tokens in outputs}) > 1 for position in range(3))
        third = sorted(ROWS[3])[1]
        powered = [p ** (1 / temperature) if p >= third else 0.0 for p in ROWS[3]]
        share = sum(tokens[0] == 2 for tokens in outputs) / 300
        assert abs(share - powered[2] / sum(powered)) < 0.1


def test_params_own_temperature_and_seed_u20(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier worked at temperature 1 and took its seed from the clock.

    The caller's T = .5 is in the law, and the caller's seed decides: twice the same text, also in another engine.
    """
    params = SamplingParams(temperature=0.5, max_tokens=14, seed=20)
    texts = {engine("widths:2,1").generate([0], params).tokens for _ in range(2)}
    again = engine("widths:2,1")
    texts |= {again.generate([0], params).tokens for _ in range(3)}
    assert len(texts) == 1
    assert len({again.generate([0], params.model_copy(update={"seed": seed})).tokens for seed in range(8)}) > 4
    law, accepted = engine_law(monkeypatch, again, [0], SamplingParams(temperature=0.5, max_tokens=3))
    assert accepted == 1
    assert distance(law, chain_law(by_hand(0.5), 0, 3)) < 1e-12
    assert distance(law, chain_law(ROWS, 0, 3)) > 0.1
