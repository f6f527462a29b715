"""Where metrics go: always a JSONL file, TensorBoard when asked."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .run_directory import RunDirectory, append_record


class Logger(Protocol):
    """One destination. ``step`` is the training step, however often it is called."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One line per call: the step, the seconds that the run has taken so far, and the metrics."""

    def __init__(self, path: Path, elapsed: Callable[[], float]) -> None:
        self._path = path
        self._elapsed = elapsed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_record(self._path, {"step": step, "seconds": round(self._elapsed(), 3), **metrics})

    def close(self) -> None:
        """Nothing is held open between calls."""


class TensorBoardLogger:
    """Scalars for TensorBoard.

    Args:
        directory: its event files; made anew, so that a resumed run shows no step twice.
        history: the records that ``metrics.jsonl`` holds already.
    """

    def __init__(self, directory: Path, history: Iterable[Mapping[str, float]] = ()) -> None:
        # Here and not at the top: it costs a second, and only those who want it should pay.
        events: Any = import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = events.Event, summaries.Summary
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = EventFileWriter(str(directory))
        for record in history:
            self.log(int(record["step"]), {k: v for k, v in record.items() if k not in ("step", "seconds")})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


class Loggers:
    """Passes metrics to every destination; refuses what is not a number.

    A number that is not finite is replaced by ``NAME/not_finite`` = 1, so that a curve never silently skips
    a step.
    """

    def __init__(self, destinations: list[Logger]) -> None:
        self._destinations = destinations

    @classmethod
    def for_run(cls, directory: RunDirectory, elapsed: Callable[[], float], *, tensorboard: bool) -> Loggers:
        """Those that the configuration asks for; ``elapsed`` gives the seconds of the run so far."""
        destinations: list[Logger] = [JsonlLogger(directory.metrics_file, elapsed)]
        if tensorboard:
            destinations.append(TensorBoardLogger(directory.logs / "tensorboard", directory.records()))
        return cls(destinations)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step's metrics; a mapping in place of a number is logged as ``NAME/KEY`` each.

        Raises:
            TypeError: a value is not a number; names the metric.
        """
        clean: dict[str, float] = {}
        for name, value in _flat(metrics):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a number")
            if math.isfinite(value):
                clean[name] = value
            else:
                clean[f"{name}/not_finite"] = 1.0
        for destination in self._destinations:
            destination.log(step, clean)

    def close(self) -> None:
        """Flush and close every destination; idempotent."""
        while self._destinations:
            self._destinations.pop().close()


def _flat(metrics: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
