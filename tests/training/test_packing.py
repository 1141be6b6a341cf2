"""Packed rows: nothing lost, nothing doubled, documents apart, the same order again from (seed, epoch)."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import pytest
import torch
from synthetic_shards import FEATURES, VOCABULARY, answer, toy_fingerprint, write_data

from outrider.errors import RunError, UsageError
from outrider.training import batches as batches_module
from outrider.training.batch import Batch
from outrider.training.batches import BatchReader, Place, Prefetch, real_tokens
from outrider.training.generate import Answer
from outrider.training.packing import Corpus, Piece, is_validation, open_corpus, pack, plan_epoch, shared_beginning
from outrider.training.shards import shard_path, write_shard

ROW = 32


def opened(folder: Path, validation: float = 0.0) -> Corpus:
    return open_corpus([folder], FEATURES, ROW, validation)


def documents(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Every document of a batch, cut out by its number."""
    found = []
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row].max()) + 1):
            here = batch.documents[row] == number
            parts = {name: getattr(batch, name)[row][here] for name in ("tokens", "answers", "positions", "best")}
            found.append(parts | {f"hidden.{name}": state[row][here] for name, state in batch.features.items()})
    return found


def test_an_epoch_holds_every_answer_once(tmp_path: Path) -> None:
    made = write_data(tmp_path)
    corpus = opened(tmp_path)
    reader = BatchReader(corpus, FEATURES, rows=2)
    count = -(-len(plan_epoch(corpus.training, ROW, 7, 0)) // 2)
    batches = list(islice(reader.training(7, Place()), count))
    assert batches[-1][0] == Place(1)
    found = {}
    for _, batch in batches:
        assert batch.tokens.shape[1] == ROW
        for document in documents(batch):
            found[tuple(document["tokens"].tolist())] = document
    assert sum(real_tokens(batch) for _, batch in batches) == sum(len(one.tokens) for one in made)
    assert len(found) == len(made)
    for one in made:
        document = found[tuple(one.tokens)]
        prompt = len(one.request.prompt)
        assert document["answers"].tolist() == [False] * prompt + [True] * (len(one.tokens) - prompt)
        assert document["positions"].tolist() == list(range(len(one.tokens)))
        assert document["best"].tolist() == one.best.tolist()
        for name in FEATURES:
            assert torch.equal(document[f"hidden.{name}"], one.features[name].float())


def test_padding_is_marked_and_never_an_answer(tmp_path: Path) -> None:
    write_data(tmp_path, count=5, shards=1)
    corpus = opened(tmp_path)
    batch = BatchReader(corpus, FEATURES, rows=8).read(plan_epoch(corpus.training, ROW, 0, 0))
    padding = batch.documents < 0
    assert padding.any()
    assert not batch.answers[padding].any()
    assert (batch.best[padding] == -1).all()


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    write_data(tmp_path)
    pieces = opened(tmp_path).training
    assert plan_epoch(pieces, ROW, 1, 3) == plan_epoch(opened(tmp_path).training, ROW, 1, 3)
    assert plan_epoch(pieces, ROW, 1, 3) != plan_epoch(pieces, ROW, 1, 4)
    assert plan_epoch(pieces, ROW, 1, 3) != plan_epoch(pieces, ROW, 2, 3)


def test_reading_goes_on_from_a_place(tmp_path: Path) -> None:
    write_data(tmp_path)
    reader = BatchReader(opened(tmp_path), FEATURES, rows=4)
    undisturbed = list(islice(reader.training(0, Place()), 20))
    for stop in (3, 11):
        place = undisturbed[stop - 1][0]
        again = list(islice(reader.training(0, place), 20 - stop))
        assert [after for after, _ in again] == [after for after, _ in undisturbed[stop:]]
        assert all(torch.equal(a.tokens, b.tokens) for (_, a), (_, b) in zip(again, undisturbed[stop:], strict=True))


def test_rows_are_never_overfull_and_well_filled() -> None:
    pieces = [Piece(0, 0, 3 + (7 * n) % 38, 1) for n in range(600)]
    rows = pack(pieces, 64)
    filled = [sum(len(piece) for piece in row) for row in rows]
    assert max(filled) <= 64
    assert sorted(map(len, pieces)) == sorted(len(piece) for row in rows for piece in row)
    assert sum(filled) > 0.97 * 64 * len(rows)


def test_long_answers_keep_their_end(tmp_path: Path) -> None:
    fingerprint = toy_fingerprint()
    long, edge = answer(0, list(range(10)), 40), answer(1, [1, 2], 30)
    write_shard(shard_path(tmp_path, 0), [long, edge], fingerprint)
    corpus = opened(tmp_path)
    assert corpus.cut == 1
    batch = BatchReader(corpus, FEATURES, rows=2).read(pack(corpus.training, ROW))
    assert batch.tokens[0].tolist() == long.tokens[-ROW:]
    assert batch.answers[0].all()
    assert batch.tokens[1].tolist() == edge.tokens


def test_validation_is_the_same_whatever_the_shards_order(tmp_path: Path) -> None:
    made = write_data(tmp_path / "a", count=200)
    fingerprint = toy_fingerprint()
    (tmp_path / "b").mkdir()
    write_shard(shard_path(tmp_path / "b", 0), made[150:], fingerprint)
    write_shard(shard_path(tmp_path / "b", 1), made[:150][::-1], fingerprint)

    def kept(folder: Path) -> set[tuple[int, ...]]:
        corpus = opened(folder, validation=0.2)
        return {tuple(corpus.shards[p.shard].tokens[p.start : p.stop].tolist()) for p in corpus.validation}

    assert kept(tmp_path / "a") == kept(tmp_path / "b")
    assert 20 <= len(kept(tmp_path / "a")) <= 65
    other = {is_validation(torch.tensor([n], dtype=torch.int32), 0.2, seed=1) for n in range(50)}
    assert other == {True, False}


def test_answers_to_one_prompt_stay_on_one_side(tmp_path: Path) -> None:
    fingerprint = toy_fingerprint()
    twice = [answer(2 * n + k, [n, n + 1, n + 2], 3 + k) for n in range(40) for k in range(2)]
    write_shard(shard_path(tmp_path, 0), twice, fingerprint)
    corpus = opened(tmp_path, validation=0.3)

    def prompts(pieces: list[Piece]) -> set[int]:
        return {int(corpus.shards[0].tokens[piece.start]) for piece in pieces}

    assert prompts(corpus.training) & prompts(corpus.validation) == set()
    assert prompts(corpus.training) | prompts(corpus.validation) == set(range(40))


def test_folders_are_read_one_after_the_other(tmp_path: Path) -> None:
    write_data(tmp_path / "a", count=10)
    write_data(tmp_path / "b", count=20, seed=1)
    corpus = open_corpus([tmp_path / "a", tmp_path / "b"], FEATURES, ROW, 0.0)
    assert len(corpus.training) == 30
    assert corpus.identity() != opened(tmp_path / "a").identity()
    counts = corpus.answer_counts(corpus.training)
    assert counts.shape == (VOCABULARY,)
    assert int(counts.sum()) == corpus.counts()["training_answer_tokens"]


def test_data_without_answers_is_refused(tmp_path: Path) -> None:
    write_data(tmp_path, is_answered=False)
    with pytest.raises(UsageError, match="no token that the target wrote"):
        opened(tmp_path)


def test_a_missing_hidden_state_is_named(tmp_path: Path) -> None:
    write_data(tmp_path)
    with pytest.raises(UsageError, match=r"0, 1, 2, final, but 3 is needed.*--features 3,final"):
        open_corpus([tmp_path], (3, "final"), ROW)


def test_folders_of_different_targets_are_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "a")
    write_data(tmp_path / "b", fingerprint=dataclasses.replace(toy_fingerprint(), target="name:other"))
    with pytest.raises(UsageError, match="another target"):
        open_corpus([tmp_path / "a", tmp_path / "b"], FEATURES, ROW)


def test_open_files_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path, count=30, shards=9)
    monkeypatch.setattr(batches_module, "OPEN_FILES", 2)
    reader = BatchReader(opened(tmp_path), FEATURES, rows=1)
    for _ in islice(reader.training(0, Place()), 12):
        assert len(reader._files) <= 2


def test_the_background_thread_hands_over_errors_and_ends(tmp_path: Path) -> None:
    made: list[Answer] = write_data(tmp_path)
    assert made
    reader = BatchReader(opened(tmp_path), FEATURES, rows=1)
    with Prefetch(reader.training(0, Place())) as batches:
        first = [after for after, _ in islice(batches, 5)]
        thread = batches._thread
    assert first == [Place(0, n) for n in range(1, 6)]
    assert not thread.is_alive()
    for path in tmp_path.iterdir():
        path.unlink()
    with (
        pytest.raises(RunError, match="any more"),
        Prefetch(BatchReader(reader.corpus, FEATURES, 1).training(0, Place())) as b,
    ):
        next(iter(b))


def test_whole_texts_supervise_training_prompts_behind_the_template_only(tmp_path: Path) -> None:
    """``whole_text``: prompts are labels too, but not what every text begins with, and never in validation."""
    answers = [answer(number, [1, 2, 3, 10 + number, 5], 6) for number in range(8)]
    write_shard(shard_path(tmp_path, 0), answers, toy_fingerprint())
    plain = open_corpus([tmp_path], FEATURES, ROW, 0.3)
    whole = open_corpus([tmp_path], FEATURES, ROW, 0.3, whole_text=True)
    assert shared_beginning(whole.shards) == 3
    assert {piece.prompt for piece in plain.training} == {5}
    assert {piece.prompt for piece in whole.training} == {3}
    assert whole.validation == plain.validation
    assert plain.validation
    batch = BatchReader(whole, FEATURES, rows=1).read(pack(whole.training, ROW)[:1])
    first = batch.documents[0] == 0
    assert batch.answers[0][first].tolist() == [False] * 3 + [True] * 8
