"""Environments of programs that run in a Python of their own: any interpreter, and a file of hashed versions.

What a program does with its environment beyond installing packages (links, generated files) is part of the
build: an environment that lacks it is not finished.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .clearing import clear
from .deadline import Deadline, build_timeout_s
from .environment import BUILDING, COMPLETE
from .errors import BuildError
from .identity import content_hash
from .locking import BuildLock
from .marks import is_unfinished_mark, read_mark, write_mark
from .uv import Uv, find_uv

_TAG = (
    "import sys; v = sys.version_info; "
    "print(f'{sys.implementation.name}-{v.major}.{v.minor}.{v.micro} {sys.base_prefix}')"
)
_TAG_TIMEOUT_S = 60.0


class PinnedEnvironment(NamedTuple):
    """A virtual environment that exists or is to be built.

    Attributes:
        root: absolute path of its root directory; its name tells program, versions and Python apart.
        program: what runs in it, such as ``gym``.
        requirements: absolute path of the file of hashed versions.
        versions: hash of the content of that file and of those in ``also``.
        python: which Python, such as ``cpython-3.12.1``, and where it is installed.
        base: interpreter to make it with.
        also: absolute paths of further files that decide what is in it.
    """

    root: str
    program: str
    requirements: str
    versions: str
    python: str
    base: str
    also: tuple[str, ...] = ()

    @property
    def interpreter(self) -> str:
        """Absolute path of its ``python``."""
        return os.path.join(self.root, "bin", "python")

    @property
    def facts(self) -> dict[str, object]:
        """What its mark has to say."""
        return {"program": self.program, "versions": self.versions, "python": self.python}

    def is_complete(self) -> bool:
        """Whether it was built to the end. Reads files only."""
        return _says(self.root, COMPLETE, self.facts) and os.path.isfile(self.interpreter)


def pinned_environment(
    program: str,
    requirements: str | os.PathLike[str],
    *,
    python: str,
    directory: str | os.PathLike[str],
    also: Sequence[str | os.PathLike[str]] = (),
) -> PinnedEnvironment:
    """The environment of ``program`` below ``directory``.

    Args:
        program: first part of the folder's name.
        requirements: a requirements file in which every package has a version and hashes.
        python: interpreter to make it with.
        directory: where environments are.
        also: further files that decide what is in it, such as a script that finishes it.

    Raises:
        BuildError: a file cannot be read, or the interpreter does not run.
    """
    import hashlib

    path = os.path.abspath(requirements)
    scripts = tuple(os.path.abspath(each) for each in also)
    try:
        versions = _versions((path, *scripts))
    except OSError as error:
        raise BuildError(
            f"the versions of {program}, {error.filename or path}, cannot be read ({error.strerror})"
        ) from error
    tag = _tag(program, python)
    key = hashlib.sha256(f"{versions} {tag}".encode()).hexdigest()[:16]
    root = os.path.join(os.path.abspath(directory), f"{program}-{key}")
    return PinnedEnvironment(root, program, path, versions, tag, python, scripts)


def find_pinned(
    program: str,
    requirements: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    also: Sequence[str | os.PathLike[str]] = (),
) -> str | None:
    """Root of a finished environment of ``program`` from ``requirements`` and ``also``, for any Python."""
    versions = _versions((requirements, *also))
    parent = os.path.abspath(directory)
    names = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    for name in names:
        root = os.path.join(parent, name)
        wanted: dict[str, object] = {"program": program, "versions": versions}
        if _says(root, COMPLETE, wanted) and os.path.isfile(os.path.join(root, "bin", "python")):
            return root
    return None


def build_pinned(
    environment: PinnedEnvironment, *, finish: Callable[[PinnedEnvironment, int], object] | None = None
) -> bool:
    """Make sure that an environment is built; returns whether this process did it.

    Many processes may ask at once: one builds, the others wait. What a dead builder left is removed first.

    Args:
        environment: to build.
        finish: does what the program needs besides its packages, before the environment counts as built.
            Its second argument is the descriptor of the lock: a process that inherits it (``pass_fds``) keeps
            other builders out as long as it runs, also when this one is killed.

    Raises:
        UvMissingError: there is no uv.
        UvError: uv failed or ran past the deadline.
        LockTimeoutError: another process has been building it for longer than the deadline.
        BuildError: something else is in its place, the folder cannot be written, or the versions changed.
    """
    if environment.is_complete():
        return False
    executable = find_uv()
    try:
        with BuildLock(f"{environment.root}.lock") as lock:
            if environment.is_complete():
                return False
            clear(
                environment.root,
                is_ours=lambda: _is_ours(environment),
                mark=lambda: write_mark(environment.root, BUILDING, environment.facts),
                marker=BUILDING,
            )
            uv = Uv(executable, Deadline(build_timeout_s()), lock.fd)
            _install(environment, uv)
            if finish is not None:
                finish(environment, lock.fd)
            sources = (environment.requirements, *environment.also)
            if _versions(sources) != environment.versions:
                raise BuildError(f"{' or '.join(sources)} changed meanwhile; build again")
            write_mark(environment.root, COMPLETE, environment.facts)
            os.unlink(os.path.join(environment.root, BUILDING))
    except OSError as error:
        raise BuildError(
            f"the environment of {environment.program} at {environment.root} cannot be written ({error}); "
            f"check space and rights there, or choose another directory"
        ) from error
    return True


def _install(environment: PinnedEnvironment, uv: Uv) -> None:
    import tempfile

    # uv reads the settings of a project above the folder it runs in; above this one there is none.
    with tempfile.TemporaryDirectory(prefix="rl-actor-envs-") as folder:
        uv.run(
            *("venv", "--quiet", "--no-project", "--no-python-downloads", "--allow-existing"),
            *(f"--python={environment.base}", environment.root),
            folder=folder,
        )
        uv.run(
            *("pip", "sync", "--quiet", "--require-hashes"),
            *(f"--python={environment.interpreter}", environment.requirements),
            folder=folder,
        )


def _is_ours(environment: PinnedEnvironment) -> bool:
    """Whether what lies at the root was built here, finished or not."""
    root = environment.root
    # A builder that is killed over its first mark leaves nothing else.
    return any(_says(root, marker, environment.facts) for marker in (BUILDING, COMPLETE)) or all(
        is_unfinished_mark(name, (BUILDING,)) for name in os.listdir(root)
    )


def _versions(paths: Sequence[str | os.PathLike[str]]) -> str:
    """One hash for the content of files; that of the first alone is the file's own."""
    import hashlib

    first, *rest = (content_hash(path) for path in paths)
    return hashlib.sha256(" ".join((first, *rest)).encode()).hexdigest() if rest else first


def _says(root: str, marker: str, facts: dict[str, object]) -> bool:
    try:
        recorded = read_mark(root, marker)
    except (OSError, ValueError):
        return False
    return facts.items() <= recorded.items()


def _tag(program: str, python: str) -> str:
    import subprocess

    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _TAG],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TAG_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the Python of {program}, {python}, does not run ({error})") from error
    if done.returncode:
        raise BuildError(f"the Python of {program}, {python}, does not run: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()
