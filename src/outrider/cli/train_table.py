"""What a training run shows while it runs: a table that grows by its last line, or one line at a time in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from outrider.cli.tables import plain_table

if TYPE_CHECKING:
    from outrider.training.figures import Figures
    from outrider.training.run_state import Report

_COLUMNS = ("", "tokens", "epoch", "tok/s", "loss", "top-1 by step", "acceptance", "left")
_WIDTHS = (10, 9, 6, 7, 7, 20, 10, 7)
_SHOWN = 12


class TrainTable:
    """Lines of reports on stderr: validations stay, the newest training line takes the place of the one before."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[tuple[str, ...]] = []
        self._newest: tuple[str, ...] | None = None
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._has_header = False

    def __enter__(self) -> TrainTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, report: Report) -> None:
        """Add one report."""
        line = _line(report)
        if self._live is None:
            self._print(line)
            return
        if report.is_validation:
            self._lines.append(line)
            self._newest = None
        else:
            self._newest = line
        self._live.update(self._table(), refresh=True)

    def note(self, sentence: str) -> None:
        """A sentence of its own."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = plain_table(*_COLUMNS, right=range(1, len(_COLUMNS)))
        for line in [*self._lines[-_SHOWN:], *([self._newest] if self._newest else [])]:
            table.add_row(*line)
        return table

    def _print(self, line: tuple[str, ...]) -> None:
        for cells in (line,) if self._has_header else (_COLUMNS, line):
            self.note(" ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip())
        self._has_header = True


def _line(report: Report) -> tuple[str, ...]:
    figures = report.figures
    return (
        "validation" if report.is_validation else "training",
        f"{report.tokens:,}",
        f"{report.epoch:.2f}",
        f"{report.tokens_per_second:,.0f}",
        shown(figures.loss),
        top1(figures),
        shown(figures.acceptance),
        duration(report.seconds_left),
    )


def top1(figures: Figures) -> str:
    """Shares of right first guesses, one a step."""
    return " ".join(shown(share, 2) for share in figures.top1)


def shown(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
