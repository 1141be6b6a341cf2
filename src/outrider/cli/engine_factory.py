"""The one place where commands get an engine or a model; tests put a fake here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from outrider.cli.options import EngineOptions

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.loading import LoadedModel
    from outrider.types import Regime


def load_engine(options: EngineOptions, regime: Regime | None = None) -> Engine:
    """Load the model and build the engine; a fetch shows its progress on stderr.

    Args:
        options: as the user gave them.
        regime: refuse parts that are not exact for it before weights load.

    Raises:
        UsageError, RunError: see ``outrider.load``.
    """
    import outrider

    with FetchProgress() as progress:
        return outrider.load(**options.to_dict(), regime=regime, progress=progress.report)  # type: ignore[arg-type]


def load_target(model: str, dtype: str, weights: str, device: str, threads: int | None) -> LoadedModel:
    """Load a model without an engine, for training; a fetch shows its progress on stderr.

    Raises:
        UsageError, RunError: see ``outrider.load``.
    """
    import torch
    from pydantic import ValidationError

    from outrider.config import EngineConfig
    from outrider.engine.loading import load_model
    from outrider.sampling.params import usage_error

    values = {"model": model, "dtype": dtype, "weights": weights, "device": device, "threads": threads}
    try:
        config = EngineConfig.model_validate(values)
    except ValidationError as error:
        raise usage_error(error) from None
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with FetchProgress() as progress:
        return load_model(config.model, config, progress.report)


class FetchProgress:
    """A progress bar on stderr that appears with the first report."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> FetchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._bar.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes of ``stage`` are through."""
        if not self._tasks:
            self._bar.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)
