"""Faults that systems of this kind have had, planted one at a time: the harness finds each of them.

A copy of the package gets the fault, and the tests that watch for its kind are run against the copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ALGORITHMS = ROOT / "packages" / "rl-algorithms"
DEADLINE_S = 240
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]

CONTROLLER = ("test_controller.py", "test_controller_simulation.py", "test_replay.py", "test_staleness.py")
DISK = ("test_checkpoint_faults.py::test_what_is_published_was_flushed_first_and_its_name_after",)
RENAMES = ("test_checkpoint_faults.py::test_h10_a_publication_is_one_rename",)


@dataclass(frozen=True)
class Planted:
    """A fault: what stands in the file, and what stands there instead."""

    name: str
    file: str
    right: str
    wrong: str
    watch: tuple[str, ...] = CONTROLLER


FAULTS = [
    Planted(
        "files of a checkpoint are not flushed",
        "checkpoint_files.py",
        '        with path.open("rb") as handle:\n            os.fsync(handle.fileno())\n        files[name]',
        "        files[name]",
        DISK,
    ),
    Planted(
        "the name of a checkpoint is not flushed",
        "checkpointing.py",
        "        os.rename(folder, target)\n        fsync_directory(self._directory)",
        "        os.rename(folder, target)",
        DISK,
    ),
    Planted(
        "a checkpoint is swapped in two steps",
        "checkpointing.py",
        "        os.rename(folder, target)\n",
        "        target.mkdir()\n        os.rename(folder, target)\n",
        RENAMES,
    ),
    Planted("retries never end", "controller/play.py", "if count <= budget:", "if True:"),
    Planted(
        "data failures count as infrastructure",
        "controller/machine.py",
        "if kind is FailureKind.INFRA:",
        "if True:",
    ),
    Planted(
        "one step too many runs ahead",
        "staleness.py",
        "return max(0, (max_staleness + version + 1)",
        "return max(0, (max_staleness + version + 2)",
    ),
    Planted(
        "room is counted from the trainer's version",
        "controller/machine.py",
        "version=self._trainer.served,\n            batch",
        "version=self._trainer.version,\n            batch",
    ),
    Planted(
        "groups that are too old stay",
        "controller/machine.py",
        "        for group in self._buffer.ready:\n            if self._too_old(group.oldest):",
        "        for group in ():\n            if self._too_old(group.oldest):",
    ),
    Planted(
        "results of earlier tries count",
        "controller/play.py",
        "rollout.since is not None and rollout.tries - 1 == number",
        "rollout.since is not None",
    ),
    Planted(
        "finished groups are dropped by a resume",
        "controller/restoring.py",
        "for group in (*snapshot.ready, *groups):",
        "for group in groups:",
    ),
    Planted(
        "rows in flight are forgotten by a resume",
        "controller/restoring.py",
        "for position in range(rows.next_position):",
        "for position in range(0):",
    ),
    Planted(
        "groups of lost weights are kept",
        "controller/restoring.py",
        "usable = group.newest <= version and",
        "usable =",
    ),
    Planted(
        "a reservation leaks",
        "replay.py",
        "            self._reserved.remove(position)\n        elif",
        "            pass\n        elif",
    ),
    Planted(
        "nobody watches for a stall",
        "controller/machine.py",
        "                self._trainer.begin(event)\n                self._clock.arm",
        "                self._trainer.begin(event)\n                (lambda *_: None)",
    ),
    Planted(
        "a straggler holds its step up for ever",
        "controller/machine.py",
        'elif timer.kind == "straggler" and',
        "elif False and",
    ),
]


def watched(overlay: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests of the package against the copy in ``overlay``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *(str(ALGORITHMS / "tests" / test) for test in tests),
        ],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": f"{overlay}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def copy(folder: Path) -> Path:
    target = folder / "rl_algorithms"
    shutil.copytree(
        ALGORITHMS / "src" / "rl_algorithms", target, ignore=shutil.ignore_patterns("__pycache__")
    )
    return target


def test_without_a_fault_the_copy_passes(tmp_path: Path) -> None:
    package = copy(tmp_path)
    with (package / "__init__.py").open("a") as file:
        file.write("\nTHE_COPY = True\n")
    found = subprocess.run(
        [sys.executable, "-c", "import rl_algorithms; print(rl_algorithms.THE_COPY)"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.strip() == "True", f"another package was found: {found.stderr}"
    done = watched(tmp_path, (*CONTROLLER, *DISK, *RENAMES))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_is_found(fault: Planted, tmp_path: Path) -> None:
    file = copy(tmp_path) / fault.file
    text = file.read_text()
    assert text.count(fault.right) >= 1, "what the fault replaces is not there any more"
    file.write_text(text.replace(fault.right, fault.wrong, 1))
    done = watched(tmp_path, fault.watch)
    assert done.returncode == 1, f"nobody noticed that {fault.name}:\n{done.stdout[-2000:]}"
    assert " failed" in done.stdout, done.stdout[-2000:]


def test_there_are_enough() -> None:
    assert len({fault.name for fault in FAULTS}) >= 12
