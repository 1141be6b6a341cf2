"""The report: statuses, the verdict, JSON; the greedy part's rows; which parts run."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from engine.tiny_engines import build_engine, letters_tokenizer
from outrider.audit import plan as planning
from outrider.audit.divergence import logits_of_step
from outrider.audit.exact import ExactRow
from outrider.audit.faults import FaultRow
from outrider.audit.greedy import Divergence, GreedyRow, greedy_audit
from outrider.audit.plan import AuditPlan, Part, Sizes, parse_parts, run_audit
from outrider.audit.report import AuditReport, Status, describe, exact_report, fault_report, greedy_report, skipped
from outrider.errors import InvalidOptionError, UnknownNameError, UsageError
from outrider.models.toy import ToyModel
from outrider.sampling.params import SamplingParams
from outrider.types import ProposalKind, Topology

SMALL = Sizes(samples=100, tokens=3, replays=1_000, greedy_tokens=6)
SAMPLED = SamplingParams(temperature=1.0)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2]]


class Wobbly(ToyModel):
    """Two best logits that change places when a pass has several rows, ``gap`` apart: what rounding does."""

    def __init__(self, gap: float) -> None:
        super().__init__(vocab_size=12)
        self.gap = gap
        self.rows = 1

    def forward(self, segments, hidden=(), skip=frozenset()):  # type: ignore[no-untyped-def]
        self.rows = sum(len(segment.tokens) for segment in segments)
        return super().forward(segments, hidden, skip)

    def _logits(self, view: object, skip: frozenset[int] = frozenset()) -> Tensor:
        row = torch.full((12,), -5.0, dtype=torch.float64)
        row[3] = 2.0
        row[4] = 2.0 + (self.gap if self.rows == 4 else -self.gap)
        return row


def exact_row(distance: float, passed: bool) -> ExactRow:
    return ExactRow("multi_step", ProposalKind.IID, Topology.TREE, "top-k", distance, 40, passed, "widths (2,)")


# -- parts -------------------------------------------------------------------------------------------------------


def test_exact_and_faults() -> None:
    good = exact_report([exact_row(1e-16, True), exact_row(2e-16, True)])
    assert good.status is Status.PASSED
    assert good.table == [("multi_step", "2", "1", "80", "2.0e-16", "ok")]
    bad = exact_report([exact_row(1e-16, True), exact_row(0.01, False)])
    assert (bad.status, bad.table[0][-1]) == (Status.FAILED, "FAILED")
    assert bad.notes == ["multi_step is 0.01 from the target's law on iid proposals, tree, top-k, widths (2,)"]
    missed = fault_report([FaultRow("sort_by_q", ProposalKind.IID, 0.0, False)])
    assert missed.status is Status.FAILED
    assert missed.notes == ["sort_by_q on iid proposals was not noticed"]
    assert exact_report([]).status is Status.EMPTY


def test_greedy_says_which_path_computed_what() -> None:
    engine = build_engine("layer_skip", "chain:3", target=Wobbly(0.1), tokenizer=letters_tokenizer(12))
    engine.model.dtype = torch.bfloat16  # its tolerance is wide enough
    (row,) = greedy_audit(engine, [[1, 2]], [], 6)
    (found,) = row.divergences
    assert (found.prompt, found.tokens, found.pass_rows) == (0, (3, 4), 4)
    assert found.row_logits == pytest.approx((2.0, 1.9))
    assert found.pass_logits == pytest.approx((2.0, 2.1))
    assert found.is_explained
    report = greedy_report([row])
    assert report.status is Status.PASSED
    assert "by the pass of 4 rows" in report.notes[0]
    assert "a near tie" in report.notes[0]


def test_greedy_decodes_with_the_penalties_and_bias_that_were_asked_for() -> None:
    engine = build_engine("layer_skip", "chain:3", target=Wobbly(0.1), tokenizer=letters_tokenizer(12))
    both = SamplingParams(temperature=0.7, logit_bias={3: 1.0, 4: 1.0})
    (found,) = greedy_audit(engine, [[1, 2]], [], 6, params=both)[0].divergences
    assert found.row_logits == pytest.approx((3.0, 2.9))
    assert found.pass_logits == pytest.approx((3.0, 3.1))
    other = SamplingParams(temperature=0.7, logit_bias={5: 20.0})
    assert greedy_audit(engine, [[1, 2]], [], 6, params=other)[0].divergences == []


def test_greedy_fails_where_no_near_tie_explains() -> None:
    engine = build_engine("layer_skip", "chain:3", target=Wobbly(0.2), tokenizer=letters_tokenizer(12))
    report = greedy_report(greedy_audit(engine, [[1, 2]], ["ngram"], 6))
    assert report.status is Status.FAILED
    assert report.table[0][-1] == "FAILED"
    assert "NOT a near tie" in report.notes[0]
    assert [row["drafter"] for row in report.rows] == ["layer_skip", "ngram"]


def test_a_length_difference_is_unexplained() -> None:
    divergence = Divergence(1, 5, None, None, None, 0, float("inf"), 1e-9)
    assert not divergence.is_explained
    assert "one output ends there" in describe(divergence)


def test_greedy_passes_and_uses_a_greedy_rule_for_a_verifier_of_sampling() -> None:
    engine = build_engine("layer_skip", "chain:3", verifier="sample_match")
    lossy = build_engine("layer_skip", "chain:3", ProposalKind.DETERMINISTIC, "typical", lossy=True)
    for each in (engine, lossy):
        rows = greedy_audit(each, PROMPTS, ["ngram"], 12)
        assert [row.equal_tokens for row in rows] == [row.tokens for row in rows]
        assert rows[0].drafted > 0


def test_another_drafter_s_guesses_are_no_pass_for_the_audited_one() -> None:
    silent, busy = GreedyRow("suffix", "chain", 1, 9, 9, 0, 0), GreedyRow("ngram", "chain", 1, 9, 9, 4, 2)
    report = greedy_report([silent, busy])
    assert report.status is Status.EMPTY
    assert report.notes == ["suffix guessed nothing on these prompts, so its line tests nothing"]
    assert greedy_report([busy, silent]).status is Status.PASSED


def test_logits_of_a_step_are_the_target_s() -> None:
    engine = build_engine("layer_skip", "widths:2,2")
    result = engine.generate([1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
    for record in result.records[1:]:
        for position in range(record.position, record.position + len(record.emitted)):
            logits = logits_of_step(engine, [1, 2], result.tokens, record, position)
            assert torch.equal(logits, engine.model.logits_after([1, 2, *result.tokens[:position]]))  # type: ignore[attr-defined]


# -- the whole ---------------------------------------------------------------------------------------------------


def test_verdict_and_json() -> None:
    parts = [exact_report([exact_row(float("nan"), False)]), fault_report([]), skipped("replay", "no reason")]
    report = AuditReport({"seed": 0}, parts)
    assert not report.passed
    assert report.verdict() == "audit FAILED (FAILED: exact; not tested: faults, replay)"
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["passed"] is False
    assert [part["status"] for part in found["parts"]] == ["FAILED", "nothing tested", "skipped"]
    assert found["parts"][0]["rows"][0]["distance"] is None
    nothing = AuditReport({}, [exact_report([]), skipped("replay", "no reason")])
    assert nothing.passed
    assert nothing.verdict() == "audit tested nothing (not tested: exact, replay)"


def test_every_part_runs_in_order_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "exact_audit", lambda progress, thorough: [exact_row(0.0, True)])
    seen: list[str] = []
    engine = build_engine("layer_skip", "chain:3")
    plan = AuditPlan(SAMPLED, sizes=SMALL, also=("ngram",))
    report = run_audit(plan, engine, PROMPTS, progress=lambda part, done, total: seen.append(part))
    assert [part.name for part in report.parts] == [part.value for part in Part]
    assert report.passed
    assert {part.status for part in report.parts} == {Status.PASSED}
    assert {"faults", "greedy", "replay", "statistics"} <= set(seen)
    assert report.settings["drafter"] == "layer_skip"
    json.dumps(report.to_dict(), allow_nan=False)


def test_what_cannot_run_is_skipped_or_an_error() -> None:
    engine = build_engine("layer_skip", "chain:3", verifier="greedy")
    parts = (Part.REPLAY, Part.STATISTICS)
    lenient = run_audit(AuditPlan(SAMPLED, parts, SMALL), engine, PROMPTS)
    assert [part.status for part in lenient.parts] == [Status.SKIPPED, Status.SKIPPED]
    assert "not exact" in lenient.parts[0].summary
    assert lenient.passed
    with pytest.raises(UsageError, match="not exact"):
        run_audit(AuditPlan(SAMPLED, parts, SMALL, is_strict=True), engine, PROMPTS)
    with pytest.raises(InvalidOptionError, match="temperature above 0"):
        run_audit(AuditPlan(SamplingParams(), parts, SMALL, is_strict=True), engine, PROMPTS)


def test_parse_parts() -> None:
    assert parse_parts("greedy, exact") == (Part.EXACT, Part.GREEDY)
    with pytest.raises(UnknownNameError, match="did you mean 'greedy'"):
        parse_parts("greedi")
    with pytest.raises(InvalidOptionError, match="names no part"):
        parse_parts(" ,")
    assert not AuditPlan(SAMPLED, (Part.EXACT, Part.FAULTS)).needs_engine
    with pytest.raises(ValueError, match="need an engine"):
        run_audit(AuditPlan(SAMPLED, (Part.GREEDY,)))
