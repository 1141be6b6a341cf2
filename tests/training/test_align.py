"""THE alignment against a brute-force oracle: plain loops over single documents, written from the definitions.

x_0, x_1, ... is one document, row t has the states that predicted x_{t+1}. A head that knows x_{t+1} predicts x_{t+2}
from row t (EAGLE, Medusa), one that does not predicts x_{t+1}; each further step is one token further. A position
counts iff the target itself wrote the token that is to be predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.training.align import align, shifted
from outrider.training.batch import Batch
from outrider.training.objective import StepResult, simulated_acceptance

PADDING = -1


@dataclass(frozen=True)
class Document:
    """Tokens and, for each, whether the target wrote it; any turns in any order."""

    tokens: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class Lesson:
    """What one step learns at one row of a document: indices into that document."""

    reads: int
    label: int
    teacher: int


def oracle(document: Document, step: int, first_label: int) -> dict[int, Lesson]:
    """Row -> lesson, for supervised rows only."""
    found = {}
    for row in range(len(document.tokens)):
        label = row + first_label + step
        if label >= len(document.tokens):
            continue  # the document ends before it
        if not document.is_answer[label]:
            continue  # a user's token: the target would not have said it
        # Whatever predicts the token at ``label`` has read those before it; the row of the last of them predicted it.
        found[row] = Lesson(reads=label - 1, label=label, teacher=label - 1)
    return found


turns = st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=5)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    flags = [is_answer for is_answer, length in draw(turns) for _ in range(length)]
    tokens = draw(st.lists(st.integers(1, 99), min_size=len(flags), max_size=len(flags)))
    return Document(tokens, flags)


gaps = st.integers(0, 3)
rows = st.lists(st.tuples(documents(), gaps), min_size=1, max_size=4)
batches = st.lists(rows, min_size=1, max_size=3)


def pack(batch: list[list[tuple[Document, int]]]) -> Batch:
    """Documents one after the other, padding behind each as told; padding looks as tempting as it can."""
    length = max(sum(len(document.tokens) + gap for document, gap in row) for row in batch)
    size = (len(batch), length)
    tokens = torch.full(size, 77)
    answers = torch.ones(size, dtype=torch.bool)
    numbers = torch.full(size, PADDING)
    positions = torch.zeros(size, dtype=torch.int64)
    best = torch.full(size, -1)
    for b, row in enumerate(batch):
        start = 0
        for number, (document, gap) in enumerate(row):
            for t, token in enumerate(document.tokens):
                tokens[b, start + t] = token
                answers[b, start + t] = document.is_answer[t]
                numbers[b, start + t] = number
                positions[b, start + t] = t
                if t + 1 < len(document.tokens) and document.is_answer[t + 1]:
                    best[b, start + t] = 1000 + token  # known where a row predicted a token of the target's
            start += len(document.tokens) + gap
    return Batch(tokens, answers, numbers, positions, {}, best, torch.zeros(size))


@given(batch=batches, step=st.integers(0, 4), first_label=st.sampled_from([1, 2]))
def test_every_position_is_what_plain_loops_say(
    batch: list[list[tuple[Document, int]]], step: int, first_label: int
) -> None:
    packed = pack(batch)
    aligned = align(packed, step, first_label)
    best = aligned.at_teacher(packed.best)
    expected = torch.zeros_like(packed.answers)
    for b, row in enumerate(batch):
        start = 0
        for document, gap in row:
            for t, lesson in oracle(document, step, first_label).items():
                at = (b, start + t)
                expected[at] = True
                assert int(aligned.tokens[at]) == document.tokens[lesson.reads]
                assert int(aligned.labels[at]) == document.tokens[lesson.label]
                assert int(aligned.teacher[at]) == start + lesson.teacher
                assert int(best[at]) == 1000 + document.tokens[lesson.teacher]
            start += len(document.tokens) + gap
    assert aligned.mask.tolist() == expected.tolist()


@given(batch=batches, step=st.integers(0, 4), first_label=st.sampled_from([1, 2]))
def test_shapes_types_and_ranges_hold_off_the_mask_too(
    batch: list[list[tuple[Document, int]]], step: int, first_label: int
) -> None:
    """Every value may be used as an index, supervised or not."""
    packed = pack(batch)
    aligned = align(packed, step, first_label)
    for values in (aligned.tokens, aligned.labels, aligned.teacher, aligned.mask):
        assert values.shape == packed.tokens.shape
    assert aligned.tokens.dtype == aligned.labels.dtype == aligned.teacher.dtype == torch.int64
    assert aligned.mask.dtype == torch.bool
    assert 0 <= int(aligned.teacher.min()) <= int(aligned.teacher.max()) < packed.tokens.shape[1]
    assert int(aligned.tokens.min()) >= 0


def test_the_boundary_of_prompt_and_answer() -> None:
    """SpecForge#885: tokens and targets were shifted and the loss mask was not, or by another amount.

    Prompt x_0 x_1 x_2, answer x_3 x_4 x_5. For a head that predicts x_{t+2} the first useful row is 1: it reads x_2,
    the prompt's last token, and predicts x_3. The last is 3. A mask left where it was would train rows 3 to 5, one
    that moved by a single place rows 2 to 4: both lose row 1 and keep a row without a label of the answer.
    """
    batch = pack([[(Document([10, 11, 12, 13, 14, 15], [False, False, False, True, True, True]), 0)]])
    first = align(batch, 0, 2)
    assert first.mask[0].tolist() == [False, True, True, True, False, False]
    assert first.tokens[0, 1:4].tolist() == [12, 13, 14]
    assert first.labels[0, 1:4].tolist() == [13, 14, 15]
    assert first.teacher[0, 1:4].tolist() == [2, 3, 4]
    assert align(batch, 1, 2).mask[0].tolist() == [True, True, True, False, False, False]
    assert align(batch, 0, 1).mask[0].tolist() == [False, False, True, True, True, False]


def test_every_token_of_an_answer_is_some_rows_label_at_every_step() -> None:
    """No position is lost: only the first tokens of a text, which have no row far enough before them."""
    document = Document(list(range(10, 30)), [5 <= t < 9 or t >= 15 for t in range(20)])
    batch = pack([[(document, 2)]])
    for first_label in (1, 2):
        for step in range(5):
            aligned = align(batch, step, first_label)
            labels = sorted(aligned.labels[aligned.mask].tolist())
            reachable = [t for t in range(20) if document.is_answer[t] and t >= first_label + step]
            assert labels == [document.tokens[t] for t in reachable]


def test_a_second_turns_prompt_is_read_and_not_learnt() -> None:
    document = Document([1, 2, 3, 4, 5, 6], [False, True, False, False, True, True])
    aligned = align(pack([[(document, 0)]]), 0, 1)
    assert aligned.labels[aligned.mask].tolist() == [2, 5, 6]
    assert aligned.tokens[0].tolist() == document.tokens


def test_a_label_never_comes_from_the_next_document() -> None:
    """Even where both sides of the border are answers."""
    whole = [True] * 3
    batch = pack([[(Document([1, 2, 3], whole), 0), (Document([4, 5, 6], whole), 0)]])
    assert align(batch, 0, 2).mask[0].tolist() == [True, False, False, True, False, False]
    assert align(batch, 1, 2).mask[0].tolist() == [False] * 6


@pytest.mark.parametrize("by", [0, 1, 4, 5, 9])
def test_shifted_fills_behind_the_end(by: int) -> None:
    values = torch.arange(10).view(2, 5)
    expected = [[row[t + by] if t + by < 5 else -7 for t in range(5)] for row in values.tolist()]
    assert shifted(values, by, -7).tolist() == expected


# -- simulated acceptance ----------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.data())
def test_simulated_acceptance_counts_chains(steps: int, batch: int, length: int, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)
    masks = [data.draw(flags) for _ in range(steps)]
    guesses = [[m and c for m, c in zip(mask, data.draw(flags), strict=True)] for mask in masks]
    results = [
        StepResult(torch.zeros(()), torch.tensor(mask).view(batch, length), torch.tensor(right).view(batch, length))
        for mask, right in zip(masks, guesses, strict=True)
    ]
    kept = positions = 0
    for place in range(batch * length):
        if not all(mask[place] for mask in masks):
            continue
        positions += 1
        kept += 1  # the target's own token
        for right in guesses:
            if not right[place]:
                break
            kept += 1
    assert simulated_acceptance(results) == (kept, positions)


def test_simulated_acceptance_of_nothing_is_nothing() -> None:
    assert simulated_acceptance([]) == (0, 0)
