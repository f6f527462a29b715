"""Atomic checkpoints: a step is either wholly there and verified, or not there at all.

Layout: ``DIRECTORY/step_N/`` with whatever the caller wrote, and ``manifest.json`` with the size and
SHA-256 of every file. A checkpoint is filled in a hidden folder beside it and published by a single
rename, so that a crash at any moment leaves every earlier checkpoint loadable. One process at a time
writes a store.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .checkpoint_files import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    fingerprint,
    fsync_directory,
    score_of,
    verify,
    write_manifest,
)

logger = logging.getLogger(__name__)

__all__ = [
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointStore",
]

_PUBLISHED = re.compile(r"step_(0|[1-9][0-9]*)")
_WRITING = ".writing-"
_DELETING = ".deleting-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint."""

    step: int
    path: Path


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: made when the first checkpoint is written.
        keep: how many of the newest stay; ``None`` keeps all.
        keep_best: how many of the best stay beside them, by the score that they were written with; of equal
            ones the later. Those without a score are not among them.
        lower_is_better: what a score means.
        suffixes: file name suffixes that may be stored. Pickle-based formats stay out, since
            reading them runs code.
        on_ignored: told in one line of every damaged checkpoint that is come upon and passed over,
            once each; logged as a warning too.

    Folders that are not named ``step_N`` exactly (``step_10-hf``, ``step_x``) and ones that do not
    verify are ignored and left alone, with two exceptions: writing step N again moves a damaged
    ``step_N`` aside, and what is older than all that are kept is told by file sizes alone, so that
    flipped bytes do not save it from deletion.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None = None,
        keep_best: int = 0,
        lower_is_better: bool = False,
        suffixes: Collection[str] = (".json", ".safetensors"),
        on_ignored: Callable[[str], None] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep must be at least 1, or None for all checkpoints; got {keep}")
        if keep_best < 0:
            raise CheckpointError(f"keep_best must be >= 0, got {keep_best}")
        self._directory = Path(directory)
        self._keep = keep
        self._keep_best = keep_best
        self._sign = -1.0 if lower_is_better else 1.0
        self._suffixes = frozenset(suffixes)
        self._on_ignored = on_ignored
        self._reported: set[str] = set()
        # What this object verified or wrote, so that retention need not read it again.
        self._verified: dict[int, frozenset[tuple[str, int, int]]] = {}

    @property
    def directory(self) -> Path:
        return self._directory

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is, or would be."""
        return self._directory / f"step_{step}"

    def steps(self) -> list[int]:
        """Steps that have a folder of the right name, oldest first, complete or not."""
        if not self._directory.is_dir():
            return []
        matches = (_PUBLISHED.fullmatch(entry.name) for entry in self._directory.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of ``step``, every file verified.

        Raises:
            CheckpointCorruptError: it is missing, half-written or damaged.
            CheckpointFormatError: it is of a format that this version cannot read.
        """
        path = self.path_of(step)
        verify(path)
        self._verified[step] = fingerprint(path)
        return Checkpoint(step, path)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, every file verified; ``None`` if there is none.

        Raises:
            CheckpointFormatError: the newest is of a format that this version cannot read. Falling
                back to an older one would quietly throw training away.
        """
        return self._first_whole(reversed(self.steps()))

    def best(self) -> Checkpoint | None:
        """The complete checkpoint with the best score, every file verified; of equal ones the latest.

        ``None`` if none has a score.

        Raises:
            CheckpointFormatError: it is of a format that this version cannot read.
        """
        return self._first_whole(self._by_score())

    @contextmanager
    def write(self, step: int, *, score: float | None = None) -> Generator[Path]:
        """``with store.write(step) as folder:`` fill the empty ``folder``; it is published on exit.

        ``score`` says how good it is, for ``keep_best``; ``None`` where nobody has measured.

        If the block raises, nothing is published. A damaged ``step_N`` makes room for the new one
        and stays as ``.incomplete-step_N-…``. Older checkpoints beyond ``keep`` and ``keep_best`` are
        deleted only after the new one is published and on disk; damaged ones do not count as kept.

        Raises:
            CheckpointError: ``step`` has a complete checkpoint already, the folder holds a file of
                another type than allowed, or it cannot be written; with the cause.
        """
        if step < 0:
            raise CheckpointError(f"a checkpoint step must be >= 0, got {step}")
        if self._is_complete(step):
            raise CheckpointError(
                f"{self.path_of(step)} is complete already: resume from it, or write to another directory"
            )
        unique = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder = self._directory / f"{_WRITING}step_{step}-{unique}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder.mkdir()
            yield folder
            write_manifest(folder, step=step, suffixes=self._suffixes, score=score)
            self._publish(folder, step, unique)
            self._verified[step] = fingerprint(self.path_of(step))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {step} in {self._directory} failed: {error}"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._retain(step)

    def _first_whole(self, steps: Iterable[int]) -> Checkpoint | None:
        """The first of ``steps`` that verifies; damaged ones before it are reported."""
        for step in steps:
            try:
                return self.load(step)
            except CheckpointCorruptError as error:
                self._ignore(step, error)
        return None

    def _publish(self, folder: Path, step: int, unique: str) -> None:
        target = self.path_of(step)
        if target.exists():
            # Not complete, so nothing loadable is lost; kept aside for whoever wants to look.
            os.rename(target, self._directory / f".incomplete-step_{step}-{unique}")
        os.rename(folder, target)
        fsync_directory(self._directory)

    def _is_complete(self, step: int, *, hashes: bool = True) -> bool:
        """One of another format is somebody's complete checkpoint too."""
        try:
            verify(self.path_of(step), hashes=hashes)
        except CheckpointCorruptError as error:
            if self.path_of(step).exists():
                self._ignore(step, error)
            return False
        except CheckpointFormatError:
            pass
        return True

    def _can_be_relied_on(self, step: int) -> bool:
        known = self._verified.get(step)
        if known is not None and known == fingerprint(self.path_of(step)):
            return True
        if not self._is_complete(step):
            return False
        self._verified[step] = fingerprint(self.path_of(step))
        return True

    def _ignore(self, step: int, error: CheckpointCorruptError) -> None:
        message = " ".join(f"ignoring the damaged checkpoint step_{step}: {error}".split())
        if message in self._reported:
            return
        self._reported.add(message)
        logger.warning("%s", message)
        if self._on_ignored is not None:
            self._on_ignored(message)

    def _retain(self, published: int) -> None:
        if self._keep is None:
            return
        kept = 0
        best = self._best_complete(self._keep_best) if self._keep_best else frozenset()
        for step in reversed(self.steps()):
            # Hashes only of what deleting the others relies on.
            if kept < self._keep:
                kept += self._can_be_relied_on(step)
            elif step != published and step not in best and self._is_complete(step, hashes=False):
                # Renamed first: a kill while deleting must not leave half a checkpoint in sight.
                doomed = self._directory / f"{_DELETING}step_{step}-{uuid.uuid4().hex[:8]}"
                os.rename(self.path_of(step), doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _best_complete(self, count: int) -> frozenset[int]:
        complete = (step for step in self._by_score() if self._is_complete(step, hashes=False))
        return frozenset(itertools.islice(complete, count))

    def _by_score(self) -> list[int]:
        """Steps that have a score, the best first, of equal ones the later."""
        scores = {step: score_of(self.path_of(step)) for step in self.steps()}
        ranked = [(self._sign * score, step) for step, score in scores.items() if score is not None]
        return [step for _, step in sorted(ranked, reverse=True)]

    def _sweep(self) -> None:
        """Delete what dead writers on this machine left behind, and half-done deletions."""
        for entry in self._directory.iterdir():
            name = entry.name
            if name.startswith(_DELETING) or (name.startswith(_WRITING) and _writer_is_dead(name)):
                shutil.rmtree(entry, ignore_errors=True)


def _writer_is_dead(name: str) -> bool:
    match = re.fullmatch(re.escape(_WRITING) + r"step_\d+-(.+)-(\d+)-[0-9a-f]{8}", name)
    if match is None or match.group(1) != socket.gethostname():
        return False
    try:
        os.kill(int(match.group(2)), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
