"""The training loop: an objective, a corpus and a budget -> a trained module, curves and checkpoints.

What the run computes depends on its settings and data only. Wall clocks decide when a checkpoint is written or a line
is shown, never what is computed (unless the budget itself is given in seconds), so a killed run that is started again
ends with the same numbers, to the bit, as one that was left alone. Knows nothing of heads, their files and terminals.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from outrider.errors import RunError
from outrider.training.batch import Batch
from outrider.training.batches import BatchReader, Prefetch, real_tokens
from outrider.training.checkpoint import (
    Checkpoint,
    check_settings,
    latest_checkpoint,
    random_state,
    remove_checkpoints,
    restore_random_state,
    save_checkpoint,
)
from outrider.training.curves import write_curves
from outrider.training.figures import Figures, Tally
from outrider.training.objective import Objective
from outrider.training.optimizer import Optimizer, autocast
from outrider.training.packing import Corpus
from outrider.training.run_state import LoopSettings, Progress, Report, Upkeep, settings_json

LOG_BATCHES = 10
"""Batches averaged in one point of the curves."""

VALIDATION_TOKENS = 50_000
"""Tokens of one validation at most."""

BEST = "best"


class Trainer:
    """Runs ``objective`` over ``corpus``; ``run`` goes on from the folder's newest checkpoint.

    Args:
        described: JSON values that decide the result beside ``settings`` (method, options, data); a checkpoint of
            others is refused by name.
        restart: forget the folder's checkpoints.
        kept: tensors to store in every checkpoint beside the run's own.

    Raises:
        UsageError: when the folder holds a run of other settings, naming the difference.
        RunError: when its checkpoints are damaged.
    """

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        settings: LoopSettings,
        upkeep: Upkeep,
        described: dict[str, Any],
        restart: bool = False,
        kept: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.objective, self.settings, self.upkeep = objective, settings, upkeep
        self.progress = Progress()
        self._kept = dict(kept or {})
        self.described = {**described, **settings_json(settings)}
        self.device = next(objective.module.parameters()).device
        named = dict(objective.module.named_parameters())
        chosen = {id(parameter) for parameter in objective.parameters()}
        trained = [(name, parameter) for name, parameter in named.items() if id(parameter) in chosen]
        self.optimizer = Optimizer(trained, settings.optimizer, objective.rate_factors())
        self.reader = BatchReader(corpus, objective.features, settings.batch_rows)
        # its own: the other one is read by the thread that prepares batches, also while validation runs
        self._validation = BatchReader(corpus, objective.features, settings.batch_rows)
        self._best: dict[str, Tensor] = {}
        torch.manual_seed(settings.seed)
        if restart:
            remove_checkpoints(upkeep.folder)
        elif (found := latest_checkpoint(upkeep.folder)) is not None:
            check_settings(found.settings, self.described, upkeep.folder)
            self._restore(found)
        self._resumed_at = self.progress.tokens
        self._started = time.monotonic()

    @property
    def share_done(self) -> float:
        """Of the budget, in [0, 1]."""
        if self.settings.seconds is not None:
            return min(1.0, self.progress.seconds / self.settings.seconds)
        return min(1.0, self.progress.tokens / (self.settings.tokens or 1))

    def run(self) -> Progress:
        """Train to the end of the budget.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when a checkpoint was written.
            RunError: the training diverged, there is nothing to learn from, or the disk is full; the last
                checkpoint stays.
        """
        with _interrupts() as is_interrupted:
            if self.share_done < 1.0:
                self._train(is_interrupted)
            self._check_learning()
            self._finish()
        return self.progress

    # -- one pass ------------------------------------------------------------------------------------------------

    def _train(self, is_interrupted: threading.Event) -> None:
        progress, upkeep = self.progress, self.upkeep
        spent = progress.seconds
        self._started = saved = shown = time.monotonic()
        unsaved = 0
        self.objective.module.train()
        with Prefetch(self.reader.training(self.settings.seed, progress.place)) as batches:
            for after, batch in batches:
                self._step(batch)
                if after.number == 0:
                    self._check_learning()
                progress.place = after
                progress.seconds = spent + time.monotonic() - self._started
                unsaved += 1
                if self._is_validation_due():
                    self._validate()
                now = time.monotonic()
                if now - shown >= upkeep.report_seconds and progress.tally.batches:
                    self._report(False, progress.tally.figures())
                    shown = now
                is_over = self.share_done >= 1.0
                is_due = now - saved >= upkeep.checkpoint_seconds or unsaved >= upkeep.checkpoint_batches
                if is_due or is_over or is_interrupted.is_set():
                    self.save()
                    saved, unsaved = time.monotonic(), 0
                if is_interrupted.is_set():
                    raise KeyboardInterrupt
                if is_over:
                    return

    def _step(self, batch: Batch) -> None:
        progress = self.progress
        with autocast(self.settings.dtype, self.device):
            result = self.objective.evaluate(batch.to(self.device), True, self.share_done)
        if any(bool(step.mask.any()) for step in result.steps):  # else there is nothing to learn from it
            self.optimizer.update(result.loss, self.share_done)
            progress.tally.add(result)
        progress.tokens += real_tokens(batch)
        progress.batches += 1
        if progress.batches % LOG_BATCHES == 0:
            self._log("training", progress.tally.figures())
            progress.tally = Tally()

    def _check_learning(self) -> None:
        """Raise when no batch so far had a supervised position: the result would be the head as it started."""
        if not self.optimizer.has_moved:
            raise RunError(
                "no answer is long enough for the head's first guess, so no position is supervised; collect longer "
                "answers, or raise --row"
            )

    def _is_validation_due(self) -> bool:
        due = int(self.share_done * self.settings.validations)
        return bool(self.reader.corpus.validation) and due > self.progress.validations

    def _validate(self) -> None:
        """Evaluate the validation answers, keep the parameters if they are the best ones."""
        progress = self.progress
        figures = self._tally_validation()
        progress.validations = int(self.share_done * self.settings.validations)
        self._log("validation", figures)
        self._report(True, figures)
        score = figures.acceptance
        is_best = score is not None and (progress.best is None or score > progress.best)
        if is_best or not self.settings.keep_best:
            progress.validation = figures
        if is_best and self.settings.keep_best:
            progress.best = score
            state = self.objective.module.state_dict()
            self._best = {name: tensor.detach().clone() for name, tensor in state.items()}

    def _tally_validation(self) -> Figures:
        """Figures of the validation answers; changes neither parameters nor random state."""
        module, tally = self.objective.module, Tally()
        states = random_state()
        module.eval()
        with torch.no_grad(), autocast(self.settings.dtype, self.device):
            for batch in self._validation.validation(VALIDATION_TOKENS):
                tally.add(self.objective.evaluate(batch.to(self.device), False, self.share_done))
        module.train()
        restore_random_state(states)
        return tally.figures()

    def _finish(self) -> None:
        """Leave the module as the result: the best validation's parameters if they were asked for."""
        if self._best:
            self.objective.module.load_state_dict(self._best)
        write_curves(self.upkeep.folder, self.progress.curves)

    # -- records -------------------------------------------------------------------------------------------------

    def _log(self, kind: str, figures: Figures) -> None:
        rate = self.optimizer.rate(self.share_done)
        epoch = self.progress.place.epoch
        row = {"kind": kind, "tokens": self.progress.tokens, "epoch": epoch, "lr": rate}
        self.progress.curves.append(row | figures.as_json())

    def _report(self, is_validation: bool, figures: Figures) -> None:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        speed = (self.progress.tokens - self._resumed_at) / elapsed
        if self.settings.seconds is not None:
            left = self.settings.seconds - self.progress.seconds
        else:
            left = ((self.settings.tokens or 0) - self.progress.tokens) / max(speed, 1e-9)
        each = sum(len(piece) for piece in self.reader.corpus.training)
        epoch = self.progress.tokens / each
        self.upkeep.report(Report(is_validation, self.progress.tokens, epoch, speed, max(0.0, left), figures))

    def save(self) -> Path:
        """Write a checkpoint and the curves so far."""
        module = {f"model.{name}": tensor for name, tensor in self.objective.module.state_dict().items()}
        adam = {f"adam.{name}": tensor for name, tensor in self.optimizer.state().items()}
        chance = {f"random.{name}": tensor for name, tensor in random_state().items()}
        best = {f"{BEST}.{name}": tensor for name, tensor in self._best.items()}
        tensors = module | adam | chance | best | self._kept
        path = save_checkpoint(
            self.upkeep.folder, Checkpoint(self.described, self.progress.tokens, self.progress.as_json(), tensors)
        )
        write_curves(self.upkeep.folder, self.progress.curves)
        return path

    def _restore(self, found: Checkpoint) -> None:
        try:
            self.objective.module.load_state_dict(found.part("model"))
        except RuntimeError as error:
            reason = str(error).split("\n")[1].strip()
            raise RunError(f"{self.upkeep.folder}: the checkpoint does not fit the head: {reason}") from None
        self.optimizer.restore(found.part("adam"))
        restore_random_state(found.part("random"))
        self._best = found.part(BEST)
        self.progress = Progress.from_json(found.state)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, so that a batch is finished and saved; the second one acts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
