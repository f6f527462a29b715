"""Builds environments: third-party packages first, then the workspace's own distributions, under a lock."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .clearing import clear
from .contents import check_members, check_packages, torch_version
from .deadline import Deadline, build_timeout_s
from .environment import BUILDING, COMPLETE, DEPENDENCIES, Environment
from .errors import ActorEnvironmentError, BuildError
from .identity import lock_hash, python_tag
from .locking import BuildLock
from .requirements import entries, is_member, member_folder, of_packages, without_packages
from .uv import Uv, find_uv, torch_chosen

PHASES = ("all", "dependencies", "members")

#: Hashed versions of what builds the workspace's distributions.
BUILD_CONSTRAINTS = os.path.join("requirements", "build.txt")


def build_environment(environment: Environment, phase: str = "all") -> bool:
    """Make sure that an environment is built; returns whether this process did it.

    Many processes may ask at once: one builds, the others wait. What a dead builder left is removed first.
    An environment that is complete is only looked at, so it may be read-only.

    Args:
        environment: to build, for the running Python.
        phase: ``dependencies`` stops after the third-party packages, for which no source of the workspace is
            needed; ``members`` refuses to install any of those; ``all`` does what is left to do.

    Raises:
        UvMissingError: there is no uv.
        UvError: uv failed or ran past the deadline.
        LockTimeoutError: another process has been building it for longer than the deadline.
        BuildError: the directory is not an environment of this package, the third-party packages are
            missing (``members``), the lock changed meanwhile, or it is for another Python.
    """
    if phase not in PHASES:
        raise BuildError(f"unknown phase {phase!r}; use one of {', '.join(PHASES)}", actor=environment.actor)
    goal = DEPENDENCIES if phase == "dependencies" else COMPLETE
    if environment.fault(goal) is None:
        return False
    try:
        return _Build(environment).run(goal, only_members=phase == "members")
    except OSError as error:
        raise BuildError(
            f"the environment of {environment.actor} at {environment.root} cannot be written ({error}); "
            f"check space and rights there, or choose another directory",
            actor=environment.actor,
        ) from error
    except ActorEnvironmentError as error:
        error.actor = environment.actor
        raise


class _Build:
    """The work on one environment, by this process alone once it has the lock."""

    def __init__(self, environment: Environment) -> None:
        if environment.python != python_tag():
            raise BuildError(
                f"the environment of {environment.actor} is for {environment.python} and this is "
                f"{python_tag()}; build it with `python -m rl_actor_envs prefetch` of that Python"
            )
        self._environment = environment
        self._executable = find_uv()

    def run(self, goal: str, *, only_members: bool) -> bool:
        import tempfile

        environment = self._environment
        with (
            BuildLock(f"{environment.root}.lock") as lock,
            # uv reads the settings of a project above the folder it runs in; above this one there is none.
            tempfile.TemporaryDirectory(prefix="rl-actor-envs-") as self._folder,
        ):
            if environment.fault(goal) is None:
                return False
            self._uv = Uv(self._executable, Deadline(build_timeout_s()), lock.fd)
            fault = environment.fault(DEPENDENCIES)
            if fault is not None:
                if only_members:
                    raise BuildError(
                        f"the third-party packages of {environment.actor} are not installed: {fault}; build "
                        f"them first, with --phase dependencies or --phase all"
                    )
                clear(
                    environment.root,
                    is_ours=environment.is_ours,
                    mark=lambda: environment.mark(BUILDING),
                    marker=BUILDING,
                )
                self._install_dependencies()
            if goal == COMPLETE:
                self._install_members()
        return True

    def _install_dependencies(self) -> None:
        environment = self._environment
        self._pip("venv", "--no-project", "--allow-existing", f"--python={sys.executable}", environment.root)
        unhashed = {*environment.project.unhashed, *(["torch"] if torch_chosen() else [])}
        locked = self._export("--no-emit-local")
        pinned = of_packages(locked, unhashed)
        # Without the packages that only an unhashed one brings: another build of it may need others.
        pruned = [word for name in sorted(unhashed) for word in ("--prune", name)]
        hashed = self._export("--no-emit-local", *pruned) if pinned else locked
        target = f"--python={environment.interpreter}"
        if hashed:
            self._pip("pip", "sync", "--require-hashes", target, self._file("packages.txt", hashed))
        if pinned:
            # Only its own metadata knows what such a build needs. What that is, is taken as the lock has it.
            within = self._file("constraints.txt", without_packages(locked, unhashed))
            wanted = self._file("unhashed.txt", pinned)
            self._pip("pip", "install", target, f"--constraints={within}", f"--requirement={wanted}")
        if hashed or pinned:
            check_packages(environment.root)
        self._finish(DEPENDENCIES)

    def _install_members(self) -> None:
        environment = self._environment
        folder = environment.project.folder
        members = [
            os.path.normpath(os.path.join(folder, member_folder(entry)))
            for entry in self._export()
            if is_member(entry)
        ]
        # From here on a killed builder leaves neither the old state nor the new one.
        os.replace(os.path.join(environment.root, DEPENDENCIES), os.path.join(environment.root, BUILDING))
        if members:
            backend = f"--build-constraints={os.path.join(environment.workspace, BUILD_CONSTRAINTS)}"
            paths = [f"--editable={member}" for member in members]
            self._pip("pip", "install", "--no-deps", f"--python={environment.interpreter}", backend, *paths)
        check_members(environment.root, members)
        self._finish(COMPLETE)

    def _export(self, *arguments: str) -> list[str]:
        project = self._environment.project
        return entries(
            self._uv.run(
                *("export", "--quiet", "--frozen", "--no-header", "--no-annotate"),
                *("--package", project.package, *self._environment.selection),
                *arguments,
                folder=project.folder,
            )
        )

    def _pip(self, *arguments: str) -> None:
        self._uv.run(*arguments, "--quiet", folder=self._folder)

    def _file(self, name: str, lines: Sequence[str]) -> str:
        path = os.path.join(self._folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
        return path

    def _finish(self, marker: str) -> None:
        import time

        environment = self._environment
        if lock_hash(environment.project.lock) != environment.lock:
            raise BuildError(
                f"{environment.project.lock} changed while the environment of {environment.actor} was built "
                f"from it; build again"
            )
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        environment.mark(marker, torch=torch_version(environment.root), time=now)
        os.unlink(os.path.join(environment.root, BUILDING))
