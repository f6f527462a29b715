"""The folder of one run: what was asked, what happened, and what it can be resumed from."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from .config import ConfigError, JobConfig, load_config, to_yaml

_Config = TypeVar("_Config", bound=JobConfig)


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``summary.json`` holds.

    Attributes:
        steps: optimizer steps of reinforcement learning that are done.
        held_out_before: share of held-out problems solved before the first of them.
        held_out_after: the same after the last.
        seconds: wall time from the start of the command; a resumed run adds what the earlier parts had
            taken up to the checkpoint that it continues from.
        tokens: sampled in training rollouts.
        seconds_generation: of the rollouts of training, handing over of weights included.
        seconds_training: of scoring and updating.
        peak_memory_mb: largest resident size of the driver plus that of its worker, in MiB.
        seed: of the run.
        generation_tokens_per_second: of the engine while it sampled for training.
        seconds_refit: of handing over weights; 0 for an engine that shares the policy's.
        logprob_gap_mean: of abs(policy − engine) over the sampled tokens of a step, in nats, averaged over
            the steps.
        logprob_gap_max: the largest of any step.
    """

    steps: int
    held_out_before: float
    held_out_after: float
    seconds: float
    tokens: int
    seconds_generation: float
    seconds_training: float
    peak_memory_mb: float
    seed: int
    generation_tokens_per_second: float = 0.0
    seconds_refit: float = 0.0
    logprob_gap_mean: float = 0.0
    logprob_gap_max: float = 0.0


class RunDirectory:
    """Paths and files of one run. Every file is replaced whole or appended to, never half written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None, config: JobConfig, name: str) -> RunDirectory:
        """Make a new run directory and write its resolved configuration.

        Args:
            path: where; ``None`` picks ``runs/<name>-<time>`` in the working directory.
            config: written as ``config.yaml``.
            name: of the application.

        Raises:
            ConfigError: the directory exists and is not empty, or cannot be made.
        """
        target = path if path is not None else _fresh_path(Path("runs"), name)
        try:
            target.mkdir(parents=True, exist_ok=True)
            occupied = next(target.iterdir(), None)
        except OSError as error:
            raise ConfigError(
                f"run directory {target} cannot be made: {error}; name another with -o"
            ) from error
        if occupied is not None:
            raise ConfigError(
                f"run directory {target} is not empty; continue it with `{name} resume {target}` "
                "or name another with -o"
            )
        directory = cls(target)
        directory.logs.mkdir()
        write_file(directory.config_file, to_yaml(config))
        return directory

    @classmethod
    def open(cls, path: Path, model: type[_Config]) -> tuple[RunDirectory, _Config]:
        """An existing run directory and its configuration, of the application's kind.

        Raises:
            ConfigError: it is not a run directory.
        """
        directory = cls(path)
        if not directory.config_file.is_file():
            raise ConfigError(f"{path} is not a run directory: it has no config.yaml")
        return directory, load_config(directory.config_file, model=model)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def model(self) -> Path:
        """The model made on the spot, when there is one."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def groups(self) -> Path:
        """Finished groups that no checkpoint holds yet, of asynchronous runs."""
        return self.path / "groups"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts_file(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def trained_file(self) -> Path:
        """Which rows each step of an asynchronous run has trained."""
        return self.path / "trained.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    def write_summary(self, summary: Summary) -> None:
        write_file(self.summary_file, json.dumps(asdict(summary), indent=2) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Every whole line of ``metrics.jsonl``."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if _step(line, -1) >= 0]

    def elapsed_until(self, step: int) -> float:
        """Seconds that the run had taken when it logged ``step``; 0 when it did not get there."""
        return max(
            (record.get("seconds", 0.0) for record in self.records() if record["step"] <= step), default=0.0
        )

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keep every other process from working on this run.

        Raises:
            ConfigError: one does already.
        """
        with (self.path / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another process is working on {self.path}; wait for it or end it"
                ) from error
            yield

    def forget_after(self, step: int) -> None:
        """Drop what was logged of steps after ``step``: a resumed run makes them again."""
        for file in (self.metrics_file, self.rollouts_file, self.trained_file):
            if not file.exists():
                continue
            kept = [
                line
                for line in file.read_text(encoding="utf-8").splitlines()
                if _step(line, step + 1) <= step
            ]
            write_file(file, "".join(f"{line}\n" for line in kept))
        self.summary_file.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that a crash leaves the old or the new content, whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON object as a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def _step(line: str, unreadable: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return unreadable


def _fresh_path(parent: Path, name: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidate, number = parent / f"{name}-{stamp}", 1
    while candidate.exists():
        number += 1
        candidate = parent / f"{name}-{stamp}-{number}"
    return candidate
