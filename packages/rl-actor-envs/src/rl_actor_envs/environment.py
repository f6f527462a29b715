"""One environment: where it is, what it is made from, and how to tell that it is finished.

Its directory holds one of three files, each replaced by the next: ``building.json`` while a process works on
it, ``dependencies.json`` when the third-party packages are complete, ``environment.json`` when all of it is.
What has only the first is a dead builder's; nothing but the last makes an environment usable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from .identity import environment_name, lock_hash, python_tag
from .marks import is_unfinished_mark, read_mark, write_mark
from .workspace import Project, Workspace

BUILDING = "building.json"
DEPENDENCIES = "dependencies.json"
COMPLETE = "environment.json"
MARKERS = frozenset((BUILDING, DEPENDENCIES, COMPLETE))

#: The name of the driver's own environment where other environments have an actor's.
DRIVER = "driver"


class Environment(NamedTuple):
    """A virtual environment that exists or is to be built.

    Attributes:
        root: absolute path of its root directory.
        actor: fully qualified class of the actor that runs in it, or ``driver``.
        extras: of the project's package, in order.
        selection: what ``uv export`` is told to choose.
        project: whose lock it is made from.
        lock: hash of that lock's content.
        python: which Python it has, such as ``cpython-3.11.7``.
        workspace: root of the workspace whose members it runs.
    """

    root: str
    actor: str
    extras: tuple[str, ...]
    selection: tuple[str, ...]
    project: Project
    lock: str
    python: str
    workspace: str

    @property
    def interpreter(self) -> str:
        """Absolute path of its ``python``."""
        return os.path.join(self.root, "bin", "python")

    @property
    def facts(self) -> dict[str, object]:
        """What its marker has to say."""
        return {
            "actor": self.actor,
            "extras": list(self.extras),
            "lock": self.lock,
            "python": self.python,
            "workspace": self.workspace,
        }

    def fault(self, marker: str = COMPLETE) -> str | None:
        """Why it has not reached the state of ``marker``; ``None`` when it has. Reads files only."""
        if marker == DEPENDENCIES and self.fault(COMPLETE) is None:
            return None
        path = os.path.join(self.root, marker)
        try:
            recorded = read_mark(self.root, marker)
        except FileNotFoundError:
            return f"{path} does not exist"
        except (OSError, ValueError) as error:
            return f"{path} cannot be read ({error})"
        for key, value in self.facts.items():
            if recorded.get(key) != value:
                return f"{path} says {key}={recorded.get(key)!r}, not {value!r}"
        for part in (os.path.join(self.root, "pyvenv.cfg"), self.interpreter):
            if not os.path.isfile(part):
                return f"{part} does not exist"
        return None

    def is_ours(self) -> bool:
        """Whether what lies at the root was built here, finished or not.

        The names of the marks do not prove it: anybody may have an ``environment.json``. What holds nothing
        but a mark that was never finished is a builder's that was killed over its first one.
        """
        held = os.listdir(self.root) if os.path.isdir(self.root) else []
        if held and all(is_unfinished_mark(name, MARKERS) for name in held):
            return True
        for marker in MARKERS:
            try:
                if self.facts.keys() <= read_mark(self.root, marker).keys():
                    return True
            except (FileNotFoundError, IsADirectoryError):
                continue
            except (OSError, ValueError):
                pass
            if os.path.isfile(os.path.join(self.root, "pyvenv.cfg")):
                return True
        return False

    def mark(self, marker: str, **more: object) -> None:
        """Write ``marker`` so that it is there completely or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_mark(self.root, marker, {**self.facts, **more})


def actor_environment(
    actor: str, extras: Sequence[str], workspace: Workspace, python: str | None = None
) -> Environment:
    """The environment of an actor, below the workspace's directory of environments.

    Args:
        actor: fully qualified class name.
        extras: in order.
        workspace: what it is built from.
        python: which Python, by default the running one.

    Raises:
        WorkspaceError: the lock cannot be read.
    """
    project = workspace.project_of(extras)
    lock, tag = lock_hash(project.lock), python or python_tag()
    name = environment_name(actor=actor, extras=extras, lock=lock, python=tag, workspace=workspace.root)
    return Environment(
        root=os.path.join(workspace.environments, name),
        actor=actor,
        extras=tuple(extras),
        selection=tuple(word for extra in extras for word in ("--extra", extra)),
        project=project,
        lock=lock,
        python=tag,
        workspace=workspace.root,
    )


def driver_environment(directory: str | os.PathLike[str], workspace: Workspace) -> Environment:
    """The environment that ``grpo`` and the other commands run in, at ``directory``.

    Raises:
        WorkspaceError: the lock cannot be read.
    """
    project = workspace.project_of(())
    return Environment(
        root=os.path.abspath(os.path.expanduser(directory)),
        actor=DRIVER,
        extras=(),
        selection=("--only-group", DRIVER),
        project=project,
        lock=lock_hash(project.lock),
        python=python_tag(),
        workspace=workspace.root,
    )
