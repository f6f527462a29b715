"""Installs the pinned hatch and uv into this checkout when they are missing, then becomes hatch.

Started by `./hatch`. Standard library only. What it writes is below `.hatch/`, `.venv/` and `.venv-vllm/`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

INSTALL_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = 1800.0

#: environment of `hatch.toml` -> the files below requirements/ that it was installed from
ENVIRONMENTS = {
    ".venv": ("dev.txt",),
    ".venv-vllm": ("vllm.txt", "overrides.txt"),
}


class BootstrapError(RuntimeError):
    """The front door could not be set up; the message says what to install or run."""


def main(arguments: list[str]) -> None:
    """Prepare the checkout and replace this process by hatch with the same arguments."""
    root = Path(__file__).resolve().parents[1]
    check_location(root)
    state = root / ".hatch"
    with exclusive(state / "lock"):
        install_front_door(root, state)
        for name in ENVIRONMENTS:
            drop_stale_environment(root, state, name)
    # hatch would write a default configuration into the home folder, and refuses one that does not exist.
    (state / "config.toml").touch()
    hatch = state / "boot" / "bin" / "hatch"
    os.execve(hatch, [str(hatch), *literal(arguments)], environment(state, os.environ))


def check_location(root: Path) -> None:
    """Raise BootstrapError where uv could not read the checkout's own files: it splits paths at blanks."""
    if any(character.isspace() for character in str(root)):
        raise BootstrapError(f"the checkout's path has a blank in it ({root}); move it and try again")


def literal(arguments: list[str]) -> list[str]:
    """The arguments of `hatch run` with braces doubled: hatch formats them, and a setting may hold some."""
    if arguments[:1] != ["run"]:
        return arguments
    return ["run", *(argument.replace("{", "{{").replace("}", "}}") for argument in arguments[1:])]


@contextmanager
def exclusive(lock: Path) -> Generator[None]:
    """Hold `lock` so that two commands started at once do not install over each other.

    Raises BootstrapError when another process holds it for more than LOCK_TIMEOUT_S.
    """
    lock.parent.mkdir(exist_ok=True)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with lock.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BootstrapError(
                        f"another command has been installing for {LOCK_TIMEOUT_S:.0f} s; end it and retry"
                    ) from error
                time.sleep(0.2)
        yield


def install_front_door(root: Path, state: Path) -> None:
    """Make `.hatch/boot` hold exactly `requirements/boot.txt`, every file checked against its hash."""
    requirements = root / "requirements" / "boot.txt"
    # The commands in it name their interpreter by its full path: a checkout that was moved needs them anew.
    key = digest(requirements.read_bytes(), sys.version.encode(), sys.base_prefix.encode(), bytes(root))
    boot, stamp = state / "boot", state / "boot.key"
    if read(stamp) == key and (boot / "bin" / "hatch").exists():
        return
    say("installing hatch and uv into .hatch/ (once)")
    stamp.unlink(missing_ok=True)
    shutil.rmtree(boot, ignore_errors=True)
    python = boot / "bin" / "python"
    # Debian ships Python without ensurepip; its own pip, where present, can fill an empty environment.
    own_pip = importlib.util.find_spec("ensurepip") is not None
    if not own_pip and importlib.util.find_spec("pip") is None:
        raise BootstrapError(
            "this Python has neither ensurepip nor pip: install python3.11-venv and try again"
        )
    run([sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), str(boot)])
    pip = [str(python), "-m", "pip"] if own_pip else [sys.executable, "-m", "pip", "--python", str(python)]
    run(
        [
            *pip,
            "install",
            "-qq",
            "--no-input",
            "--no-deps",
            "--require-hashes",
            "--requirement",
            str(requirements),
        ]
    )
    stamp.write_text(key)


def drop_stale_environment(root: Path, state: Path, name: str) -> None:
    """Remove an environment that was moved, or whose pins are not the lock's any more: hatch sees neither."""
    key = environment_key(root, name)
    stamp, venv = state / f"{name.removeprefix('.')}.key", root / name
    if read(stamp) == key and (venv / "bin" / "python").exists():
        return
    if venv.is_symlink():
        venv.unlink()
    elif venv.exists():
        say(f"the lock or the checkout's place has changed: installing {name} anew")
        shutil.rmtree(venv)
    stamp.write_text(key)


def environment_key(root: Path, name: str) -> str:
    """What the environment `name` is made from, pins and place."""
    pins = [(root / "requirements" / file).read_bytes() for file in ENVIRONMENTS[name]]
    return digest(*pins, bytes(root))


def environment(state: Path, current: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables hatch runs with: its own files inside the checkout, pip's mirror for uv too."""
    result = dict(current)
    result.setdefault("HATCH_DATA_DIR", str(state / "data"))
    result.setdefault("HATCH_CACHE_DIR", str(state / "cache"))
    result.setdefault("HATCH_CONFIG", str(state / "config.toml"))
    result.setdefault("HATCH_PYTHON", "self")
    mirror = result.get("PIP_INDEX_URL")
    if mirror and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & result.keys():
        result["UV_DEFAULT_INDEX"] = mirror
    return result


def run(command: list[str]) -> None:
    """Run `command`; raise BootstrapError naming it when it fails or takes too long."""
    shown = " ".join(command)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BootstrapError(f"`{shown}` took more than {INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise BootstrapError(f"`{shown}` ended with {done.returncode}")


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read(file: Path) -> str | None:
    return file.read_text() if file.exists() else None


def say(message: str) -> None:
    print(f"hatch: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BootstrapError as failure:
        say(str(failure))
        raise SystemExit(1) from None
