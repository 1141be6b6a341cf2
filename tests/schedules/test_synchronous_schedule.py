"""The synchronous loop: long prompts in pieces, one target pass for a batch, only the rows that are needed."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine, random_prompts
from outrider.drafters.small_model import SmallModelSession
from outrider.models.base import Segment
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.schedules import synchronous

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Passes:
    """Every target pass: rows of each of its segments, and how many logits were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: object) -> None:
        self.rows: list[list[int]] = []
        self.logits: list[list[int]] = []
        original = ToyModel.forward

        def forward(model_: ToyModel, segments: list[Segment], *rest: object, **named: object) -> object:
            outputs = original(model_, segments, *rest, **named)  # type: ignore[arg-type]
            if model_ is model:
                self.rows.append([len(segment.tokens) for segment in segments])
                self.logits.append([output.logits.shape[0] for output in outputs])
            return outputs

        monkeypatch.setattr(ToyModel, "forward", forward)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 31])
def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """U03: any split gives the same text, and only the last row of the prompt gets logits."""
    monkeypatch.setattr(synchronous, "PREFILL_ROWS", 8)
    monkeypatch.setattr("outrider.models.base.PREFILL_ROWS", 8)
    prompt = [1 + i % 11 for i in range(length)]
    model = ToyModel(vocab_size=12)
    expected = []
    while len(expected) < 6:
        expected.append(int(model.logits_after([*prompt, *expected]).argmax()))
    engine = build_engine("small_model", "chain:3", target=model)
    passes = Passes(monkeypatch, engine.model)
    assert engine.generate(prompt, PARAMS).tokens == tuple(expected)
    pieces = -(-length // 8)
    assert [rows for (rows,) in passes.rows[:pieces]] == [8] * (pieces - 1) + [length - 8 * (pieces - 1)]
    assert passes.logits[:pieces] == [[0]] * (pieces - 1) + [[1]]


def test_a_batch_shares_one_target_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence brings its own tree; a finished one leaves the pass, a waiting one takes its place."""
    engine = build_engine("small_model", "chain:2")
    passes = Passes(monkeypatch, engine.model)
    prompts = random_prompts(4, 12, seed=3)
    list(engine.run([(i, p, PARAMS) for i, p in enumerate(prompts)], batch=3))
    widest = max(len(rows) for rows in passes.rows)
    assert widest == 3
    steps = [rows for rows in passes.rows if len(rows) > 1]
    assert steps
    assert all(1 <= rows <= 3 for step in steps for rows in step)


def test_hidden_states_reach_the_drafter_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """U55: one row for each committed token, from the row that predicted it, of its own request in a batch."""
    engine = build_engine("small_model", "widths:2,2")
    lane = next(iter(engine._lanes.values()))
    lane.schedule.hidden = ("final",)  # type: ignore[attr-defined]
    seen: dict[int, list[list[float]]] = {}
    original = SmallModelSession.observe

    def spy(session: SmallModelSession, observation: object) -> None:
        states = observation.hidden["final"]  # type: ignore[attr-defined]
        assert states.shape[0] == len(observation.committed)  # type: ignore[attr-defined]
        seen.setdefault(id(session), []).extend(states.tolist())
        original(session, observation)  # type: ignore[arg-type]

    monkeypatch.setattr(SmallModelSession, "observe", spy)
    prompts = random_prompts(3, 12, seed=9)
    results = dict(engine.run([(i, p, PARAMS) for i, p in enumerate(prompts)], batch=3))
    model = engine.model
    expected = []
    for index, prompt in enumerate(prompts):
        text = [*prompt, *results[index].tokens[:-1]]
        out = model.forward([Segment(model.new_cache(), text)], ["final"])[0]
        expected.append(out.hidden["final"][len(prompt) - 1 :].tolist())
    assert list(seen.values()) == expected
