"""The loop on a counting language: it learns, is measured, saved, killed, interrupted and goes on exactly."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_shards import CountingObjective, answer, toy_fingerprint, write_data

from outrider.errors import RunError, UsageError
from outrider.training import checkpoint as checkpoint_module
from outrider.training import loop as loop_module
from outrider.training.align import align
from outrider.training.batch import Batch
from outrider.training.batches import BatchReader
from outrider.training.checkpoint import checkpoint_paths
from outrider.training.curves import CURVES, read_curves
from outrider.training.loop import LOG_BATCHES, Trainer
from outrider.training.objective import BatchResult, StepResult
from outrider.training.optimizer import OptimizerSettings
from outrider.training.packing import Corpus, open_corpus
from outrider.training.run_state import LoopSettings, Progress, Report, Upkeep
from outrider.training.shards import shard_path, write_shard

SETTINGS = LoopSettings(
    tokens=6_000, batch_rows=2, validations=5, optimizer=OptimizerSettings(0.05, warmup=0.1, weight_decay=0.0)
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may run after it."""


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_data(tmp_path / "data")
    return open_corpus([tmp_path / "data"], ("final",), 32, 0.2)


def trainer(
    corpus: Corpus,
    folder: Path,
    settings: LoopSettings = SETTINGS,
    objective: CountingObjective | None = None,
    **other: Any,
) -> Trainer:
    restart = other.pop("restart", False)
    described = other.pop("described", {"row": corpus.row})
    upkeep = Upkeep(folder, **{"checkpoint_batches": 7, "report_seconds": 0.0, **other})
    return Trainer(objective or CountingObjective(), corpus, settings, upkeep, described, restart)


def outcome(folder: Path, module: torch.nn.Module) -> tuple[bytes, dict[str, list[float]]]:
    return (folder / CURVES).read_bytes(), {
        name: tensor.flatten().tolist() for name, tensor in module.state_dict().items()
    }


def test_the_loss_falls_and_validation_sees_it(corpus: Corpus, tmp_path: Path) -> None:
    reports: list[Report] = []
    run = trainer(corpus, tmp_path / "work", report=reports.append)
    progress = run.run()
    rows = read_curves(tmp_path / "work" / CURVES)
    training = [row for row in rows if row["kind"] == "training"]
    validation = [row for row in rows if row["kind"] == "validation"]
    assert len(training) == progress.batches // LOG_BATCHES
    assert len(validation) == SETTINGS.validations
    assert training[-1]["loss"] < 0.2 * training[0]["loss"]
    assert validation[-1]["top1"][0] > 0.95
    assert validation[-1]["acceptance"] == pytest.approx(1 + validation[-1]["top1"][0], abs=1e-5)
    assert validation[-1]["overlap"] == [0.5]
    assert "overlap" not in training[-1]
    assert validation[-1]["tokens"] == progress.tokens >= 6_000
    assert progress.validation is not None
    assert progress.validation.as_json()["loss"] == validation[-1]["loss"]
    assert {report.is_validation for report in reports} == {True, False}
    assert reports[-1].seconds_left == 0.0
    assert all(report.tokens_per_second > 0 for report in reports)


@pytest.mark.parametrize("batches", [3, 20, 38])
def test_a_killed_run_goes_on_exactly(corpus: Corpus, tmp_path: Path, batches: int) -> None:
    undisturbed = trainer(corpus, tmp_path / "a")
    undisturbed.run()

    class Doomed(CountingObjective):
        count = 0

        def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
            self.count += is_training
            if self.count > batches:
                raise Killed
            return super().evaluate(batch, is_training, progress)

    with pytest.raises(Killed):
        trainer(corpus, tmp_path / "b", objective=Doomed()).run()
    torch.rand(batches)  # another process's generator stands elsewhere
    # A resumed run's own start does not matter; one that was killed before its first checkpoint has only that.
    again = trainer(corpus, tmp_path / "b", objective=CountingObjective(seed=99 if batches >= 7 else 0))
    assert again.progress.batches == batches // 7 * 7
    again.run()
    first, second = (outcome(tmp_path / name, run.objective.module) for name, run in (("a", undisturbed), ("b", again)))
    assert first == second


def test_checkpoints_and_validation_change_nothing(corpus: Corpus, tmp_path: Path) -> None:
    results = []
    for number, (batches, validations) in enumerate([(3, 5), (1000, 5), (1000, 1)]):
        run = trainer(
            corpus, tmp_path / str(number), replace(SETTINGS, validations=validations), checkpoint_batches=batches
        )
        run.run()
        results.append(outcome(tmp_path / str(number), run.objective.module))
    assert results[0] == results[1]
    assert results[0][1] == results[2][1]


def test_a_finished_run_is_not_trained_again(corpus: Corpus, tmp_path: Path) -> None:
    first = trainer(corpus, tmp_path / "work").run()
    again = trainer(corpus, tmp_path / "work").run()
    assert json.dumps(again.as_json()) == json.dumps(first.as_json())
    begun = trainer(corpus, tmp_path / "work", restart=True)
    assert begun.progress == Progress()
    assert checkpoint_paths(tmp_path / "work") == []


def test_the_best_validation_can_be_kept(corpus: Corpus, tmp_path: Path) -> None:
    scores = iter([0.2, 0.9, 0.5, 0.4, 0.3])
    weights: list[torch.Tensor] = []

    run = trainer(corpus, tmp_path / "work", replace(SETTINGS, keep_best=True))
    measured = run._tally_validation

    def scripted() -> Any:
        weights.append(run.objective.module.state_dict()["weight"].clone())
        return replace(measured(), acceptance=next(scores))

    run._tally_validation = scripted  # type: ignore[method-assign]
    run.run()
    kept = run.objective.module.state_dict()["weight"]
    assert torch.equal(kept, weights[1])
    assert run.progress.validation is not None
    assert run.progress.validation.acceptance == 0.9  # of the numbers that are kept, not the last ones
    assert not torch.equal(weights[1], weights[4])
    again = trainer(corpus, tmp_path / "work", replace(SETTINGS, keep_best=True))
    again.run()
    assert torch.equal(again.objective.module.state_dict()["weight"], kept)


def test_other_settings_are_refused_by_name(corpus: Corpus, tmp_path: Path) -> None:
    trainer(corpus, tmp_path / "work").run()
    with pytest.raises(UsageError, match="with seed=0, this one has seed=1"):
        trainer(corpus, tmp_path / "work", replace(SETTINGS, seed=1))
    other = replace(SETTINGS.optimizer, learning_rate=0.06)
    with pytest.raises(UsageError, match=r"learning_rate=0\.05, this one has learning_rate=0\.06"):
        trainer(corpus, tmp_path / "work", replace(SETTINGS, optimizer=other))
    with pytest.raises(UsageError, match="row=32, this one has row=64"):
        trainer(corpus, tmp_path / "work", described={"row": 64})


def test_an_interrupt_saves_and_leaves(corpus: Corpus, tmp_path: Path) -> None:
    undisturbed = trainer(corpus, tmp_path / "a")
    undisturbed.run()

    class Interrupted(CountingObjective):
        count = 0

        def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
            self.count += is_training
            if self.count == 9:
                os.kill(os.getpid(), signal.SIGINT)
            return super().evaluate(batch, is_training, progress)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(corpus, tmp_path / "b", objective=Interrupted()).run()
    assert signal.getsignal(signal.SIGINT) is before
    again = trainer(corpus, tmp_path / "b")
    assert again.progress.batches == 9
    again.run()
    assert outcome(tmp_path / "a", undisturbed.objective.module) == outcome(tmp_path / "b", again.objective.module)


def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(corpus, tmp_path / "work")
    real, calls = checkpoint_module.save_file, []

    def full_later(*arguments: Any, **named: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments, **named)

    monkeypatch.setattr(checkpoint_module, "save_file", full_later)
    with pytest.raises(RunError, match="No space left on device"):
        run.run()
    monkeypatch.undo()
    again = trainer(corpus, tmp_path / "work")
    assert again.progress.batches == 14
    again.run()
    undisturbed = trainer(corpus, tmp_path / "other")
    undisturbed.run()
    assert outcome(tmp_path / "work", again.objective.module) == outcome(
        tmp_path / "other", undisturbed.objective.module
    )


def test_validation_never_reads_with_the_background_threads_reader(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its open files are no business of two threads: one would close what the other is about to read."""
    readers: dict[int, set[int]] = {}
    real = BatchReader._hidden

    def noted(self: BatchReader, shard: int, name: Any) -> Any:
        readers.setdefault(id(self), set()).add(threading.get_ident())
        return real(self, shard, name)

    monkeypatch.setattr(BatchReader, "_hidden", noted)
    trainer(corpus, tmp_path / "work").run()
    assert len(readers) == 2
    assert all(len(threads) == 1 for threads in readers.values())


@pytest.mark.parametrize("tokens", [100, 6_000])
def test_answers_without_a_supervised_position_are_refused(tmp_path: Path, tokens: int) -> None:
    """Not a head that is as it started, after hours: at the end of the first pass, or of a shorter training."""
    write_shard(shard_path(tmp_path, 0), [answer(n, [n], 1) for n in range(40)], toy_fingerprint())

    class SecondToken(CountingObjective):
        def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
            step = StepResult(torch.zeros(()), align(batch, 0, 2).mask, torch.zeros_like(batch.answers))
            return BatchResult(step.loss, [step])

    run = trainer(open_corpus([tmp_path], ("final",), 32, 0.0), tmp_path / "work", replace(SETTINGS, tokens=tokens),
                  SecondToken())  # fmt: skip
    with pytest.raises(RunError, match="no position is supervised"):
        run.run()
    assert run.progress.tokens <= 100


def test_what_a_killed_save_left_is_removed(corpus: Corpus, tmp_path: Path) -> None:
    run = trainer(corpus, tmp_path / "work")
    run.run()
    left = tmp_path / "work" / "checkpoint-00000000000007.part"
    left.write_bytes(b"half")
    run.save()
    assert not left.exists()
    assert trainer(corpus, tmp_path / "work").progress.tokens == run.progress.tokens


def test_a_budget_in_seconds(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: float(next(ticks)))
    run = trainer(corpus, tmp_path / "work", replace(SETTINGS, tokens=None, seconds=60.0))
    progress = run.run()
    assert 60.0 <= progress.seconds <= 70.0
    assert progress.validations == SETTINGS.validations
    assert 5 < progress.batches < 60


def test_divergence_keeps_the_last_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    class Diverging(CountingObjective):
        def evaluate(self, batch: Batch, is_training: bool, progress: float) -> BatchResult:
            result = super().evaluate(batch, is_training, progress)
            return replace(result, loss=result.loss * math.nan) if progress > 0.5 else result

    with pytest.raises(RunError, match="diverged"):
        trainer(corpus, tmp_path / "work", objective=Diverging()).run()
    assert all(
        torch.isfinite(t).all() for t in trainer(corpus, tmp_path / "work").objective.module.state_dict().values()
    )
