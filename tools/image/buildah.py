"""Runs buildah: every command with a deadline, in a storage of the caller's choice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: Debian package of each command that is needed
PACKAGES = {"buildah": "buildah", "runc": "runc", "mmdebstrap": "mmdebstrap"}

BUILD_TIMEOUT_S = 3600.0
COMMAND_TIMEOUT_S = 600.0
_RETRIES = 2
_KILL_GRACE_S = 10.0
_LAST_LINES = 60
# buildah runs from a sealed copy of itself; sealing fails now and then while another thread maps it.
_PASSING = "sealing memfd copy"


class ImageError(RuntimeError):
    """An image could not be built or is not what it should be; says what and the remedy."""


def unavailable() -> str | None:
    """Why no image can be built on this machine, or None."""
    missing = [package for command, package in PACKAGES.items() if shutil.which(command) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        return "images are built without a daemon by root only; use docker build instead"
    try:
        with temporary_storage() as buildah:
            container = buildah.run("from", "scratch").strip()
            buildah.run("mount", container)
    except ImageError as error:
        return f"buildah cannot mount here: {error}"
    return None


def run_in_session(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command; one that is not done in time, or is interrupted, ends with all that it started.

    Raises subprocess.TimeoutExpired.
    """
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # Not until the pipes end: a child in a session of its own may hold them open.
        child.wait(timeout=_KILL_GRACE_S)
        raise
    finally:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    return subprocess.CompletedProcess(command, child.returncode, out, err)


@dataclass(frozen=True)
class Buildah:
    """buildah with its images in `storage`, or in its own default place."""

    storage: Path | None = None

    def run(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Return what `buildah ARGUMENTS` writes; raise ImageError with its last lines when it fails."""
        done = self._run_once(arguments, timeout_s)
        for _ in range(_RETRIES):
            if done.returncode and _PASSING in done.stderr:
                done = self._run_once(arguments, timeout_s)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:])
            raise ImageError(f"`{_shown(arguments)}` ended with {done.returncode}:\n{last}")
        return done.stdout

    def _run_once(self, arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        command = [*self._command(), *arguments]
        try:
            return run_in_session(command, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ImageError(f"`{_shown(arguments)}` did not end within {timeout_s:.0f} s") from error

    def build(self, context: Path, dockerfile: Path, tag: str, *arguments: str) -> str:
        """Build `dockerfile` with the layers of earlier builds; return the log."""
        flags = ("--isolation", "chroot", "--layers", "--file", str(dockerfile), "--tag", tag)
        return self.run("bud", *flags, *arguments, str(context), timeout_s=BUILD_TIMEOUT_S)

    def has(self, image: str) -> bool:
        """Whether an image of that name is in the storage."""
        try:
            self.run("inspect", "--type", "image", image)
        except ImageError:
            return False
        return True

    @contextmanager
    def container(self, image: str) -> Generator[str]:
        """A container of `image`, removed afterwards."""
        name = self.run("from", "--pull-never", image).strip()
        try:
            yield name
        finally:
            self.run("rm", name)

    def execute(
        self, container: str, command: Sequence[str], *, user: str = "0:0", env: dict[str, str] | None = None
    ) -> str:
        """Run a command inside; return its standard output."""
        variables = [flag for name, value in (env or {}).items() for flag in ("--env", f"{name}={value}")]
        inside = ("run", "--isolation", "chroot", "--user", user, *variables, container, "--")
        return self.run(*inside, *command)

    def _command(self) -> list[str]:
        if self.storage is None:
            return ["buildah"]
        return ["buildah", "--root", str(self.storage / "root"), "--runroot", str(self.storage / "run")]


@contextmanager
def temporary_storage() -> Generator[Buildah]:
    """A buildah whose images and containers are gone afterwards."""
    # Not below /tmp: overlay mounts need a real file system, and there may be gigabytes.
    folder = Path(tempfile.mkdtemp(prefix="rl-image-", dir="/var/tmp"))
    buildah = Buildah(folder)
    try:
        yield buildah
    finally:
        for cleanup in (("rm", "--all"), ("rmi", "--all", "--force")):
            try:
                buildah.run(*cleanup)
            except ImageError:
                continue
        for mount in (folder / "root" / "overlay", folder / "root"):
            subprocess.run(["umount", str(mount)], capture_output=True, timeout=60, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _shown(arguments: Sequence[str]) -> str:
    text = " ".join(("buildah", *arguments))
    return text if len(text) <= 300 else text[:300] + " …"
