"""What the audit found, part by part: a status, a sentence, a table of texts for people, rows for programs.

Knows how to read each part's rows, not how they were made, and not how a table is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from outrider.audit.exact import TOLERANCE, ExactRow
from outrider.audit.faults import FaultRow
from outrider.audit.greedy import Divergence, GreedyRow
from outrider.audit.replay import ReplayRow
from outrider.audit.statistical import ALPHA, LawTest, PromptComparison

Readable = Callable[[int], str]
"""Token id -> text that is safe to print."""


class Status(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    EMPTY = "nothing tested"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class PartReport:
    """One part.

    Attributes:
        name, status: which part, and how it ended.
        summary: one sentence with the figures that matter.
        columns, numeric, table: a table of texts; ``numeric`` are the columns to align on the right.
        notes: lines that explain single rows, failures first.
        rows: the same and more for programs, JSON values only.
    """

    name: str
    status: Status
    summary: str
    columns: tuple[str, ...] = ()
    numeric: tuple[int, ...] = ()
    table: Sequence[tuple[str, ...]] = ()
    notes: Sequence[str] = ()
    rows: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All parts, and what was audited."""

    settings: Mapping[str, object]
    parts: Sequence[PartReport] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no part failed."""
        return all(part.status is not Status.FAILED for part in self.parts)

    def verdict(self) -> str:
        """One line."""
        names = {s: [part.name for part in self.parts if part.status is s] for s in Status}
        pieces = [f"FAILED: {', '.join(names[Status.FAILED])}"] if names[Status.FAILED] else []
        pieces += [f"passed: {', '.join(names[Status.PASSED])}"] if names[Status.PASSED] else []
        untested = names[Status.EMPTY] + names[Status.SKIPPED]
        pieces += [f"not tested: {', '.join(untested)}"] if untested else []
        tested = names[Status.FAILED] + names[Status.PASSED]
        outcome = "FAILED" if not self.passed else "passed" if tested else "tested nothing"
        return f"audit {outcome} ({'; '.join(pieces)})"

    def to_dict(self) -> dict[str, object]:
        """JSON values; infinite figures become ``null``."""
        parts = [
            {"part": p.name, "status": p.status.value, "summary": p.summary, "rows": p.rows, "notes": list(p.notes)}
            for p in self.parts
        ]
        found = {"passed": self.passed, "verdict": self.verdict(), "settings": dict(self.settings), "parts": parts}
        return {key: _json(value) for key, value in found.items()}


def skipped(name: str, reason: str) -> PartReport:
    """A part that was not run."""
    return PartReport(name, Status.SKIPPED, reason)


def exact_report(rows: Sequence[ExactRow]) -> PartReport:
    """One line a verifier: how many cases it claims, the largest total variation among them."""
    table = []
    for name in dict.fromkeys(row.verifier for row in rows):
        own = [row for row in rows if row.verifier == name]
        trees, worst = sum(row.trees for row in own), max(row.distance for row in own)
        kinds = len({(row.kind, row.topology) for row in own})
        table.append((name, str(len(own)), str(kinds), f"{trees:,}", f"{worst:.1e}", _mark(all(r.passed for r in own))))
    bad = [row for row in rows if not row.passed]
    notes = [
        f"{row.verifier} is {row.distance:.2g} from the target's law on {row.kind} proposals, {row.topology}, "
        f"{row.setting}, {row.worst}"
        for row in bad
    ]
    summary = (
        f"{len(rows) - len(bad)} of {len(rows)} claimed cases give the target's law to {TOLERANCE:g} total variation"
    )
    columns = ("verifier", "cases", "kinds", "trees", "largest distance", "")
    return PartReport("exact", _status(not bad, rows), summary, columns, (1, 2, 3, 4), table, notes, _dicts(rows))


def fault_report(rows: Sequence[FaultRow]) -> PartReport:
    """One line a planted fault: how far it moves the output law, and whether the exact part notices."""
    table = [(row.name, row.kind.value, f"{row.distance:.3f}", "caught" if row.caught else "MISSED") for row in rows]
    missed = [f"{row.name} on {row.kind} proposals was not noticed" for row in rows if not row.caught]
    summary = f"{len(rows) - len(missed)} of {len(rows)} planted mistakes are caught"
    columns = ("planted mistake", "proposals", "distance", "")
    return PartReport("faults", _status(not missed, rows), summary, columns, (2,), table, missed, _dicts(rows))


def greedy_report(rows: Sequence[GreedyRow], readable: Readable = str) -> PartReport:
    """One line a drafter, the audited one first; a note for each difference from plain decoding."""
    table, notes = [], []
    for row in rows:
        ties = sum(divergence.is_explained for divergence in row.divergences)
        other = len(row.divergences) - ties
        figures = (row.prompts, row.drafted, row.accepted, row.equal_tokens, row.tokens, ties, other)
        table.append((row.drafter, row.shape.partition(":")[0], *map(str, figures), _mark(row.passed)))
        notes += [f"{row.drafter}: {describe(divergence, readable)}" for divergence in row.divergences]
        if row.drafted == 0:
            notes.append(f"{row.drafter} guessed nothing on these prompts, so its line tests nothing")
    columns = ("drafter", "shape", "prompts", "drafted", "accepted", "equal", "of", "ties", "other", "")
    wrong = sum(not divergence.is_explained for row in rows for divergence in row.divergences)
    equal, tokens = sum(row.equal_tokens for row in rows), sum(row.tokens for row in rows)
    summary = f"{equal} of {tokens} tokens are plain decoding's; {wrong} difference(s) that no near tie explains"
    # The first row is the drafter that was asked for: guesses of the others say nothing about it.
    status = _status(wrong == 0, [row for row in rows[:1] if row.drafted])
    return PartReport("greedy", status, summary, columns, tuple(range(2, 9)), table, notes, _dicts(rows))


def describe(divergence: Divergence, readable: Readable = str) -> str:
    """One sentence: where, which tokens, their logits by either path, and whether a near tie explains it."""
    where = f"prompt {divergence.prompt}, token {divergence.position}"
    if divergence.tokens is None or divergence.row_logits is None:
        return f"{where}: one output ends there and the other goes on: please report this"
    plain, other = (f"'{readable(token)}'" for token in divergence.tokens)
    text = f"{where}: plain {plain}, speculative {other}; logits {_pair(divergence.row_logits)} by one row"
    if divergence.pass_logits is not None:
        text += f", {_pair(divergence.pass_logits)} by the pass of {divergence.pass_rows} rows"
    verdict = "a near tie" if divergence.is_explained else "NOT a near tie: please report this"
    return f"{text}; gap {divergence.gap:.2g}, {verdict} (tolerance {divergence.tolerance:g})"


def replay_report(rows: Sequence[ReplayRow]) -> PartReport:
    """One line a stored step and one for all of them: frequencies against the known p."""
    steps = [row for row in rows if row.prompt is not None]
    table = [
        (
            "all" if row.prompt is None else f"{row.prompt}:{row.position}",
            row.kind,
            str(row.children),
            f"{row.replays:,}",
            f"{100 * row.accepted / max(1, row.replays):.0f} %",
            f"{row.distance:.4f}",
            f"{row.chance:.4f}",
            _least(row.tests),
            _mark(all(test.passed for test in row.tests)),
        )
        for row in rows
    ]
    tests = [test for row in rows for test in row.tests]
    summary = f"{sum(row.replays for row in steps):,} replays of {len(steps)} stored step(s): {_law_summary(tests)}"
    columns = ("step", "proposal", "children", "replays", "accepted", "distance", "chance", "least p", "")
    notes = [
        f"step {row.prompt}:{row.position}, {_explain(t)}" if row.prompt is not None else f"all steps, {_explain(t)}"
        for row in rows
        for t in row.tests
        if not t.passed
    ]
    status = _status(not notes, tests)
    return PartReport("replay", status, summary, columns, (2, 3, 4, 5, 6, 7), table, notes, _dicts(rows))


def statistics_report(rows: Sequence[PromptComparison]) -> PartReport:
    """One line a test of a prompt's plain against its speculative continuations."""
    table = [
        (
            str(row.prompt),
            test.name,
            str(test.test.cells),
            f"{test.test.statistic:.1f}",
            "perm." if test.test.freedom == 0 else str(test.test.freedom),
            f"{test.test.p_value:.3g}",
            f"{test.corrected:.3g}",
            _mark(test.passed),
        )
        for row in rows
        for test in row.tests
    ]
    tests = [test for row in rows for test in row.tests]
    drafted, accepted = sum(row.drafted for row in rows), sum(row.accepted for row in rows)
    samples = max((row.samples for row in rows), default=0)
    summary = (
        f"2 x {samples:,} continuations of {len(rows)} prompt(s), {drafted:,} guesses drafted, {accepted:,} accepted: "
        f"{_law_summary(tests)}"
    )
    columns = ("prompt", "compared", "cells", "statistic", "freedom", "p", "corrected", "")
    notes = [f"prompt {row.prompt}, {_explain(t)}" for row in rows for t in row.tests if not t.passed]
    if drafted == 0:
        notes.append("nothing was guessed on these prompts, so both samples are plain decoding's")
    status = _status(not any(not t.passed for t in tests), tests if drafted else [])
    return PartReport("statistics", status, summary, columns, (2, 3, 4, 5, 6), table, notes, _dicts(rows))


def _law_summary(tests: Sequence[LawTest]) -> str:
    if not tests:
        return "nothing to compare"
    least = min(test.corrected for test in tests)
    return f"least corrected p {least:.3g} of {len(tests)} tests (below {ALPHA:g} fails)"


def _explain(test: LawTest) -> str:
    return f"{test.name}: p {test.test.p_value:.2g}, corrected {test.corrected:.2g}: another law than the target's"


def _least(tests: Sequence[LawTest]) -> str:
    return f"{min(test.corrected for test in tests):.3g}" if tests else "-"


def _status(passed: bool, tested: Sequence[object]) -> Status:
    if not passed:
        return Status.FAILED
    return Status.PASSED if tested else Status.EMPTY


def _mark(passed: bool) -> str:
    return "ok" if passed else "FAILED"


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.4f} and {values[1]:.4f}"


def _dicts(rows: Sequence[ExactRow | FaultRow | GreedyRow | ReplayRow | PromptComparison]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


def _json(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
