"""Saves in the background: the state is copied at the call and written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .agreement import agreed
from .checkpoint import SavedFile, prepare_directory, write_files
from .errors import CheckpointError, PeerError
from .manifest import Manifest, WrittenFile, write_manifest
from .placement import RankGroup
from .refusals import marked

# The longest that anything here waits, for a disk or for another rank.
SAVE_SECONDS = 1800.0


class PendingSave:
    """A save that goes on by itself; made by ``MegatronPolicy.save_async``."""

    def __init__(self, directory: Path, write: Callable[[], None]) -> None:
        self.directory = directory
        self._write = write
        self._error: BaseException | None = None
        self._told = False
        # Not a daemon: a process that ends in good order completes its save first.
        self._thread = threading.Thread(target=self._run, name=f"save {directory.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float = SAVE_SECONDS) -> None:
        """Return once the checkpoint is complete and on disk, on every rank.

        Raises:
            CheckpointError: it could not be saved (the first cause is chained), or is not complete
                after ``timeout_s`` seconds; then it goes on and can be waited for again.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"saving the policy to {self.directory} takes longer than {timeout_s:g} s; it goes on: "
                "wait longer, or save to a faster disk"
            )
        if self._error is not None:
            self._told = True
            raise CheckpointError(
                f"the policy cannot be saved to {self.directory}: {self._error}"
            ) from self._error

    def settle(self) -> None:
        """As :meth:`wait`, but silent about a failure that :meth:`wait` has told before."""
        if not (self._told and self.done):
            self.wait()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # kept for whoever waits: a thread has nobody to tell
            self._error = error


class Saver:
    """One policy's saves, one after another. With several ranks every method but ``close`` is a collective.

    Args:
        world: all ranks of the policy.
    """

    def __init__(self, world: RankGroup) -> None:
        self._world = world
        self._pending: PendingSave | None = None
        self._own_group: RankGroup | None = None

    def start(
        self,
        directory: Path,
        snapshot: Callable[[], list[SavedFile]],
        manifest: Manifest,
    ) -> PendingSave:
        """Copy the state now and write it in a thread.

        Args:
            directory: new or empty, on a file system that all ranks see.
            snapshot: copies of what this rank writes; collective.
            manifest: what else is saved.

        Raises:
            CheckpointError: the directory cannot be used, or the previous save failed and nobody was
                told yet.
            PeerError: so it is on another rank.
        """
        self.settle()
        first = self._world.first
        files: list[SavedFile] = []
        self.together(lambda: prepare_directory(directory) if first else None)
        self.together(lambda: files.extend(snapshot()))

        def write() -> None:
            written: list[list[WrittenFile]] = self.together(lambda: write_files(directory, files))
            files.clear()

            def complete() -> None:
                if first:
                    write_manifest(directory, [file for of_rank in written for file in of_rank], manifest)

            self.together(complete)

        self._pending = PendingSave(directory, write)
        return self._pending

    def settle(self) -> None:
        """Wait for the pending save.

        Raises:
            CheckpointError: it failed, and nobody was told yet.
        """
        # Not by together(): the writing thread of a save that takes too long uses its group.
        with agreed(self._world):
            self._settle()

    def close(self) -> None:
        """Wait for this rank's pending save and release the ranks' group; raises as :meth:`settle`."""
        try:
            # Whoever ends may be the only rank to do so.
            self._settle()
        finally:
            if self._own_group is not None:
                dist.destroy_process_group(self._own_group.group)
                self._own_group = None

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; what each made of it, by rank, or an error on all of them.

        Raises:
            PeerError: another rank failed; names it and its cause.
            Exception: whatever ``work`` raised here.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        outcomes = self._exchange(
            (result, None if failure is None else f"{type(failure).__name__}: {failure}")
        )
        if failure is not None:
            raise marked(failure)
        for rank, (_, cause) in enumerate(outcomes):
            if cause is not None:
                raise marked(PeerError(f"rank {rank} failed: {cause}", rank=rank))
        return [made for made, _ in outcomes]

    def _exchange(self, value: Any) -> list[Any]:
        if self._world.size == 1:
            return [value]
        if self._own_group is None:
            # Of its own, because the writing thread uses it while training communicates.
            group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_SECONDS))
            self._own_group = RankGroup.of(group)
        return self._own_group.gather_objects(value)
