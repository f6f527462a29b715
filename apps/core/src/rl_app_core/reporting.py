"""What a person sees of a run: a live display on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# Off a terminal a phase prints so many lines without a measurement, and more where it is silent for long.
_PLAIN_LINES = 6
_SILENT_S = 30.0


class RunReporter:
    """Progress of the phases of a run, one after the other.

    Off a terminal each phase prints every measurement, six lines more whatever its length, and one with the
    first step that ends after half a minute without any.

    Args:
        console: where to.
        clock: seconds that never go back.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._spoke_at = clock()
        self._live = console.is_terminal
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._last_line = 0

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_phase()

    def line(self, text: str) -> None:
        """One line that stays."""
        self.console.print(escape(text), highlight=False, soft_wrap=True)
        self._spoke_at = self._clock()

    def begin_phase(self, name: str, total: int, completed: int = 0) -> None:
        """Start counting a phase of ``total`` steps, ``completed`` of which are done already."""
        self.end_phase()
        self._total = total
        self._last_line = completed
        if self._live:
            self._progress = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
            self._task = self._progress.add_task(name, total=total, completed=completed, note="")

    def advance(self, name: str, step: int, numbers: Mapping[str, float], *, measured: bool = False) -> None:
        """Step ``step`` of the phase is done; a ``measured`` one has a result worth keeping on the screen."""
        note = "  ".join(f"{label} {_short(value)}" for label, value in numbers.items())
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, note=note)
        if self._is_due(step, measured):
            self.line(f"{name} {step:>4}/{self._total}  {note}")

    def _is_due(self, step: int, measured: bool) -> bool:
        silent = self._clock() - self._spoke_at >= _SILENT_S
        rare = (step - self._last_line) * _PLAIN_LINES >= self._total
        due = measured or (not self._live and (rare or silent))
        self._last_line = step if due else self._last_line
        return due

    def end_phase(self) -> None:
        """Take the live display down; idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
