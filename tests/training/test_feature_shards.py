"""Feature files: what is written is read, and nothing half-written or of another target passes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_targets import FEATURES, some_requests, toy_target

from outrider.errors import RunError, UsageError
from outrider.models.toy import ToyModel
from outrider.training.collect import target_fingerprint
from outrider.training.generate import Answer, answer_all
from outrider.training.shards import (
    describe,
    iterate,
    open_folder,
    read_features,
    read_fingerprint,
    read_shard,
    shard_path,
    shard_paths,
    write_shard,
)

KEY = target_fingerprint(toy_target(), FEATURES)


def some_answers(count: int = 5) -> list[Answer]:
    return list(answer_all(ToyModel(61), some_requests(count, temperature=1.0), FEATURES, frozenset({0}), 8))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes fail as on a full disk (EFBIG in place of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_round_trip(tmp_path: Path) -> None:
    answers = some_answers()
    write_shard(shard_path(tmp_path, 0), answers[:2], KEY)
    write_shard(shard_path(tmp_path, 1), answers[2:], KEY)
    found, shards = open_folder(tmp_path, KEY)
    assert found == KEY == read_fingerprint(shard_path(tmp_path, 1))
    assert [len(shard) for shard in shards] == [2, 3]
    for answer, (shard, number) in zip(answers, iterate(shards), strict=True):
        rows = shard.span(number)
        assert shard.tokens[rows].tolist() == answer.tokens
        assert shard.index[number] == answer.request.index
        assert shard.prompts[number] == len(answer.request.prompt)
        assert shard.temperature[number] == answer.request.temperature
        assert shard.finished[number] == answer.is_finished
        assert torch.equal(shard.best[rows], answer.best)
        assert torch.equal(shard.log_sum[rows], answer.log_sum)
        states = read_features(shard, (2, "final"), rows)
        assert torch.equal(states[2], answer.features[2])
        assert torch.equal(states["final"], answer.features["final"])
    tokens = sum(len(answer.tokens) for answer in answers)
    prompts = sum(len(answer.request.prompt) for answer in answers)
    assert describe(shards) == {"answers": 5, "tokens": tokens, "answer_tokens": tokens - prompts}


def test_the_size_of_a_shard_is_foretold(tmp_path: Path) -> None:
    answers = some_answers(40)
    write_shard(shard_path(tmp_path, 0), answers, KEY)
    tokens = sum(len(answer.tokens) for answer in answers)
    header_and_answers = 3000 + 30 * len(answers)
    assert 0 <= shard_path(tmp_path, 0).stat().st_size - tokens * KEY.bytes_per_token() < header_and_answers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": "other"}, "another target"),
        ({"tokenizer": "other"}, "another tokenizer"),
        ({"template": "other"}, "another template"),
        ({"features": (1, "final"), "hidden_size": 9}, "another features and hidden_size"),
    ],
)
def test_what_differs_from_a_fingerprint_is_named(change: dict[str, object], words: str, tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 0), some_answers(), KEY)
    with pytest.raises(UsageError, match=words):
        open_folder(tmp_path, replace(KEY, **change))  # type: ignore[arg-type]


def test_shards_of_two_targets_are_not_mixed(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 0), some_answers(), KEY)
    write_shard(shard_path(tmp_path, 1), some_answers(), replace(KEY, target="other"))
    with pytest.raises(UsageError, match=r"features-00001.* another target"):
        open_folder(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no feature files"):
        open_folder(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 200, -1])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    path = shard_path(tmp_path, 0)
    write_shard(path, some_answers(), KEY)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UsageError, match=r"features-00000.safetensors is not a"):
        read_shard(path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = shard_path(tmp_path, 0)
    save_file({"tokens": torch.zeros(3)}, path)
    with pytest.raises(UsageError, match="not a feature file"):
        read_shard(path)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    answers = some_answers(30)
    with largest_file(8000), pytest.raises(RunError, match="make room"):
        write_shard(shard_path(tmp_path, 0), answers, KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_failed_keeps_the_one_before(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 0), some_answers(2), KEY)
    before = shard_path(tmp_path, 0).read_bytes()
    with largest_file(8000), pytest.raises(RunError):
        write_shard(shard_path(tmp_path, 0), some_answers(30), KEY)
    assert shard_path(tmp_path, 0).read_bytes() == before


def test_a_half_written_file_never_has_a_shards_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def dying(source: Path, target: Path) -> None:
        seen.append([path.name for path in tmp_path.iterdir()])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", dying)
    with pytest.raises(RunError, match="No space left"):
        write_shard(shard_path(tmp_path, 0), some_answers(), KEY)
    assert seen == [["features-00000.part"]]
    assert shard_paths(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
