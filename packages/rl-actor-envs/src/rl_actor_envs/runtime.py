"""From an actor to the part of Ray's ``runtime_env`` that chooses its interpreter."""

from __future__ import annotations

import os
import sys
from typing import TypedDict

from .errors import ActorEnvironmentError, MissingEnvironmentError
from .identity import environment_name, lock_hash, python_tag
from .registry import ActorRegistry, shared_registry
from .system import SYSTEM_FLAG, system_interpreter_forced

DIRECTORY_VARIABLE = "RL_ACTOR_ENVS_DIR"


class ActorRuntimeEnv(TypedDict):
    """The two keys of a ``runtime_env`` that this package decides."""

    py_executable: str
    env_vars: dict[str, str]


def make_actor_runtime_env(
    actor: str | type,
    *,
    lock: str | os.PathLike[str] | None = None,
    python: str | None = None,
    registry: ActorRegistry | None = None,
) -> ActorRuntimeEnv:
    """The interpreter of an actor and the variables that go with it.

    An actor whose row is ``None``, and every actor under ``RL_ACTOR_ENVS_SYSTEM=1``, gets the driver's own
    ``sys.executable`` and no variables. Any other gets its environment below ``RL_ACTOR_ENVS_DIR`` (by
    default ``rl-actor-envs`` in the user's cache directory), with ``VIRTUAL_ENV`` and
    ``UV_PROJECT_ENVIRONMENT`` naming the environment's root directory. It looks at files only: it builds
    nothing and starts nothing.

    Args:
        actor: a class, or its fully qualified name.
        lock: path of the lock file that the environment was built from; by default ``RL_ACTOR_ENVS_LOCK``.
        python: which Python it was built with, by default one like the driver's.
        registry: where to look the actor up, by default the process's own.

    Raises:
        UnknownActorError: the actor is in neither the table nor the registry.
        MissingEnvironmentError: its environment has not been built.
        ActorEnvironmentError: not a class or name, no lock file, or a flag with an unknown value.
    """
    name = actor_name(actor)
    extras = (registry or shared_registry()).extras_of(name)
    if system_interpreter_forced() or extras is None:
        return {"py_executable": _driver_interpreter(name), "env_vars": {}}
    directory = environment_name(
        actor=name, extras=extras, lock=lock_hash(lock), python=python or python_tag()
    )
    root = os.path.join(environments_directory(), directory)
    interpreter = os.path.join(root, "bin", "python")
    for part in (os.path.join(root, "pyvenv.cfg"), interpreter):
        if not os.path.isfile(part):
            raise MissingEnvironmentError(
                f"the environment of actor {name} is not built: {part} does not exist; build a virtual "
                f"environment at {root} from apps/container with {_flags(extras)}, or set {SYSTEM_FLAG}=1 to "
                f"run every actor on the driver's interpreter",
                actor=name,
            )
    return {
        "py_executable": interpreter,
        "env_vars": {"VIRTUAL_ENV": root, "UV_PROJECT_ENVIRONMENT": root},
    }


def actor_name(actor: str | type) -> str:
    """The fully qualified name of an actor class.

    Raises:
        ActorEnvironmentError: neither a class nor a name.
    """
    if isinstance(actor, str):
        return actor
    if isinstance(actor, type):
        return f"{actor.__module__}.{actor.__qualname__}"
    raise ActorEnvironmentError(
        f"{actor!r} is neither a class nor a name; pass the class itself, before ray.remote, or its full name"
    )


def environments_directory() -> str:
    """Absolute path of the directory that holds the environments; it need not exist."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if not chosen:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        chosen = os.path.join(cache, "rl-actor-envs")
    return os.path.abspath(os.path.expanduser(chosen))


def _driver_interpreter(actor: str) -> str:
    if not sys.executable:
        raise ActorEnvironmentError(
            f"actor {actor} runs on the driver's interpreter, but this process does not know its own path; "
            f"start the driver with a python executable",
            actor=actor,
        )
    return sys.executable


def _flags(extras: tuple[str, ...]) -> str:
    return " ".join(f"--extra {extra}" for extra in extras) or "no extras"
