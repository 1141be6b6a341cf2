"""The coarse test on the toy model: a correct engine passes, 10% of total variation does not."""

from __future__ import annotations

import pytest

from engine.tiny_engines import build_engine
from outrider.audit.report import Status, statistics_report
from outrider.audit.statistical import ALPHA, LawTest, PromptComparison, compare_continuations, statistical_audit
from outrider.engine.engine import Engine
from outrider.engine.registry import VERIFIERS
from outrider.errors import UsageError
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind

PARAMS = SamplingParams(temperature=1.0, max_tokens=4)
PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "biased", "audit.biased_verifiers:BiasedBy10Percent")


def engine(verifier: str = "multi_step", lossy: bool = False) -> Engine:
    target = ToyModel(12, order=1, sharpness=0.7, seed=3)
    return build_engine("layer_skip", "chain:3", ProposalKind.IID, verifier, target=target, lossy=lossy)


def names_of_failures(row: PromptComparison) -> set[str]:
    return {test.name for test in row.tests if not test.passed}


def test_a_correct_engine_passes_at_full_size() -> None:
    calls: list[tuple[int, int]] = []
    (row,) = statistical_audit(engine(), [PROMPT], PARAMS, 2_000, 0, progress=lambda a, b: calls.append((a, b)))
    assert names_of_failures(row) == set()
    names = [test.name for test in row.tests]
    assert names == ["token 1", "token 2", "token 3", "length", "token counts", "pair counts"]
    assert row.drafted > row.accepted > 1_000
    assert calls[-1] == (4_000, 4_000)
    assert statistics_report([row]).status is Status.PASSED


def test_a_bias_of_10_percent_is_detected() -> None:
    (row,) = statistical_audit(engine("biased"), [PROMPT], PARAMS, 2_000, 0)
    assert {"token 1", "token 2", "token 3", "pair counts"} <= names_of_failures(row)
    assert statistics_report([row]).status is Status.FAILED


@pytest.mark.skipif("typical" not in VERIFIERS, reason="typical is not registered")
def test_a_lossy_verifier_fails() -> None:
    (row,) = statistical_audit(engine("typical", lossy=True), [PROMPT], PARAMS, 800, 0)
    assert names_of_failures(row)


def test_reproducible_and_seeded() -> None:
    first, again, other = (statistical_audit(engine(), [PROMPT], PARAMS, 40, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_corrected_over_all_prompts() -> None:
    rows = statistical_audit(engine(), [PROMPT, [4, 5]], PARAMS, 100, 0)
    tests = [test for row in rows for test in row.tests]
    assert [row.prompt for row in rows] == [0, 1]
    least = min(tests, key=lambda test: test.test.p_value)
    assert least.corrected == pytest.approx(min(1.0, len(tests) * least.test.p_value))


def test_ended_continuations_count_as_a_token_of_their_own() -> None:
    """Plain goes on where the other ends: without an 'ended' cell positions 2 and 3 would compare nothing."""
    found = {t.name: t for t in compare_continuations([[1, 2, 3]] * 60, [[1]] * 60, 3, 0)}
    assert found["token 2"].test.p_value < ALPHA
    assert found["length"].test.p_value < ALPHA
    assert "token 1" not in found


def test_the_batch_does_not_matter() -> None:
    one, many = (statistical_audit(engine(), [PROMPT], PARAMS, 40, 1, batch=batch) for batch in (1, 7))
    assert one == many


def test_temperature_0_of_a_verifier_for_sampling_alone_is_refused() -> None:
    greedy = build_engine("layer_skip", "chain:3", None, "greedy")
    with pytest.raises(UsageError, match="not exact"):
        statistical_audit(greedy, [PROMPT], PARAMS, 100, 0)


def test_nothing_guessed_is_not_a_pass() -> None:
    rows = statistical_audit(build_engine("none"), [PROMPT], PARAMS, 100, 0)
    report = statistics_report(rows)
    assert report.status is Status.EMPTY
    assert any("nothing was guessed" in note for note in report.notes)


def test_a_law_test_passes_from_alpha_on() -> None:
    (test, *_) = compare_continuations([[1], [2]] * 30, [[1], [2]] * 30, 1, 0)
    assert LawTest(test.name, test.test, ALPHA).passed
    assert not LawTest(test.name, test.test, ALPHA * 0.99).passed


def test_continuations_share_the_prompt_s_cache() -> None:
    """With ``reuse`` a place in the batch evaluates the prompt once, later requests only its last token."""
    built = engine()
    seen: list[int] = []
    forward = built.model.forward

    def counting(segments, hidden=(), skip=frozenset()):  # type: ignore[no-untyped-def]
        seen.extend(len(segment.tokens) for segment in segments)
        return forward(segments, hidden, skip)

    built.model.forward = counting  # type: ignore[method-assign]
    requests = [(number, PROMPT, PARAMS.model_copy(update={"max_tokens": 1, "seed": number})) for number in range(6)]
    first = [result.tokens for _, result in built.run(requests, 2, reuse=True)]
    assert seen == [3, 3, 1, 1, 1, 1]
    assert first == [result.tokens for _, result in built.run(requests, 2)]
