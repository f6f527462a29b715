"""From an actor to the part of Ray's ``runtime_env`` that chooses its interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TypedDict

from .environment import Environment, actor_environment
from .errors import ActorEnvironmentError, MissingEnvironmentError
from .fingerprint import check_fingerprint
from .identity import python_tag
from .registry import ActorRegistry, shared_registry
from .system import SYSTEM_FLAG, system_interpreter_forced
from .table import ACTOR_ENVIRONMENTS, stage_of
from .workspace import DIRECTORY_VARIABLE, WORKSPACE_VARIABLE, find_workspace

_DECIDED_HERE = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")


class ActorRuntimeEnv(TypedDict):
    """The two keys of a ``runtime_env`` that this package decides."""

    py_executable: str
    env_vars: dict[str, str]


def make_actor_runtime_env(
    actor: str | type,
    *,
    env_vars: Mapping[str, str] | None = None,
    build: bool = False,
    workspace: str | os.PathLike[str] | None = None,
    python: str | None = None,
    registry: ActorRegistry | None = None,
) -> ActorRuntimeEnv:
    """The interpreter of an actor and the variables that go with it.

    An actor whose row is ``None``, and every actor under ``RL_ACTOR_ENVS_SYSTEM=1``, gets the driver's own
    ``sys.executable`` and the caller's variables alone. Any other gets its environment, and with it
    ``VIRTUAL_ENV`` and ``UV_PROJECT_ENVIRONMENT``, which name the environment's root directory.

    Args:
        actor: a class, or its fully qualified name.
        env_vars: further variables of the actor, passed on as they are (``PYTHONPATH``, say).
        build: build an environment that is not there, or wait for the process that does; by default it looks
            at files only.
        workspace: root of the workspace that environments are built from; by default
            ``RL_ACTOR_ENVS_WORKSPACE``, else the checkout that this package lies in.
        python: which Python the environment has (``cpython-3.11.7``), by default one like the driver's.
        registry: where to look the actor up, by default the process's own.

    Raises:
        FingerprintMismatchError: what environments are made from is not what was recorded.
        UnknownActorError: the actor is in neither the table nor the registry.
        MissingEnvironmentError: its environment has not been built; says how to build it.
        BuildError: building it failed (``build=True``).
        ActorEnvironmentError: not a class or name, variables that are decided here, no workspace or lock, or
            a flag with an unknown value.
    """
    check_fingerprint(workspace=workspace)
    name = actor_name(actor)
    given = _checked_variables(env_vars or {}, name)
    environment = environment_of(name, workspace=workspace, python=python, registry=registry)
    if environment is None:
        return {"py_executable": _driver_interpreter(name), "env_vars": given}
    fault = environment.fault()
    if fault is not None and build:
        from .builder import build_environment

        build_environment(environment)
    elif fault is not None:
        raise MissingEnvironmentError(
            f"the environment of actor {name} is not built: {fault}; build it with "
            f"`{prefetch_command(environment)}`, or set {SYSTEM_FLAG}=1 to run every actor on the driver's "
            f"interpreter",
            actor=name,
        )
    root = environment.root
    return {
        "py_executable": environment.interpreter,
        "env_vars": {**given, **dict.fromkeys(_DECIDED_HERE, root)},
    }


def environment_of(
    actor: str | type,
    *,
    workspace: str | os.PathLike[str] | None = None,
    python: str | None = None,
    registry: ActorRegistry | None = None,
) -> Environment | None:
    """The environment that an actor runs in, built or not; ``None`` is the driver's interpreter.

    Raises:
        ActorEnvironmentError: as :func:`make_actor_runtime_env`.
    """
    name = actor_name(actor)
    extras = (registry or shared_registry()).extras_of(name)
    if system_interpreter_forced() or extras is None:
        return None
    return actor_environment(name, extras, find_workspace(workspace), python)


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


def prefetch_command(environment: Environment) -> str:
    """The shell command that builds one environment, wherever it is run."""
    import shlex

    from .uv import TORCH_CHOICES

    places = {
        WORKSPACE_VARIABLE: environment.workspace,
        DIRECTORY_VARIABLE: os.path.dirname(environment.root),
    }
    # Which build of torch is meant belongs to the command: a shell of its own does not have the setting.
    # An address is left out, since it may hold a password.
    given = {name: os.environ.get(name, "") for name in TORCH_CHOICES}
    chosen = {name: value for name, value in given.items() if value and "://" not in value}
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**places, **chosen}.items())
    own = environment.python == python_tag()
    python = shlex.quote(sys.executable or "python") if own else f"python{_series(environment.python)}"
    command = f"{settings} {python} -m rl_actor_envs prefetch"
    if ACTOR_ENVIRONMENTS.get(environment.actor) == list(environment.extras):
        return f"{command} --only {environment.actor}"
    # Known to this process alone, by registration.
    flags = " ".join(f"--extra {extra}" for extra in environment.extras)
    row = f"{environment.actor}\\t{stage_of(environment.extras)}\\t{flags}\\n"
    return f"printf {shlex.quote(row)} | {command} --rows -"


def _series(python: str) -> str:
    """``3.11`` of ``cpython-3.11.7``."""
    return ".".join(python.rpartition("-")[2].split(".")[:2])


def _checked_variables(env_vars: Mapping[str, str], actor: str) -> dict[str, str]:
    for name in _DECIDED_HERE:
        if name in env_vars:
            raise ActorEnvironmentError(
                f"env_vars of actor {actor} set {name}, which names the actor's environment and is decided "
                f"by its row in the table; leave it out",
                actor=actor,
            )
    for name, value in env_vars.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ActorEnvironmentError(
                f"env_vars of actor {actor} hold {name!r}: {value!r}; both have to be strings", actor=actor
            )
    return dict(env_vars)


def _driver_interpreter(actor: str) -> str:
    if not sys.executable:
        raise ActorEnvironmentError(
            f"actor {actor} runs on the driver's interpreter, but this process does not know its own path; "
            f"start the driver with a python executable",
            actor=actor,
        )
    return sys.executable
