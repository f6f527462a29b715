"""From an actor to the part of Ray's ``runtime_env`` that chooses its interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TypedDict

from .errors import ActorEnvironmentError, MissingEnvironmentError
from .fingerprint import check_fingerprint
from .identity import EnvironmentSpec, environment_of
from .markers import ENVIRONMENT, is_marked
from .registry import ActorRegistry, shared_registry
from .system import SYSTEM_FLAG, system_interpreter_forced
from .workspace import find_workspace

# What the environment itself sets.
_OWN_VARIABLES = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")


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
    ``sys.executable`` and the caller's variables alone. Any other gets its environment, with
    ``VIRTUAL_ENV`` and ``UV_PROJECT_ENVIRONMENT`` naming the environment's root directory.

    Args:
        actor: a class, or its fully qualified name.
        env_vars: further variables of the actor; they pass through unchanged.
        build: build a missing environment, or wait for another process that does. Otherwise files are
            looked at only: nothing is built and nothing started.
        workspace: root of the checkout that environments are built from; by default
            ``RL_ACTOR_ENVS_WORKSPACE``, or the checkout that this package lies in.
        python: which Python the environment was built with, such as ``cpython-3.11.7``; by default one
            like the driver's.
        registry: where to look the actor up, by default the process's own.

    Raises:
        UnknownActorError: the actor is in neither the table nor the registry.
        MissingEnvironmentError: its environment has not been built; names the command that does.
        FingerprintMismatchError: the environments were built from something else.
        BuildError: ``build``, and it failed.
        WorkspaceError: there is no workspace.
        ActorEnvironmentError: not a class or name, a variable that the environment sets itself, or a flag
            with an unknown value.
    """
    name = actor_name(actor)
    extras = (registry or shared_registry()).extras_of(name)
    variables = _checked(env_vars or {}, name)
    if system_interpreter_forced() or extras is None:
        return {"py_executable": _driver_interpreter(name), "env_vars": variables}
    place = find_workspace(workspace)
    check_fingerprint(place)
    spec = environment_of(name, extras, place, python=python)
    if not is_marked(spec, ENVIRONMENT):
        if not build:
            raise MissingEnvironmentError(_missing(spec), actor=name)
        from .builder import ensure_environment

        ensure_environment(spec, place)
    own = dict.fromkeys(_OWN_VARIABLES, spec.root)
    return {"py_executable": spec.interpreter, "env_vars": {**variables, **own}}


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


def _checked(variables: Mapping[str, str], actor: str) -> dict[str, str]:
    for name in _OWN_VARIABLES:
        if name in variables:
            raise ActorEnvironmentError(
                f"env_vars of actor {actor} hold {name}, which its environment sets itself; leave it out",
                actor=actor,
            )
    return dict(variables)


def _missing(spec: EnvironmentSpec) -> str:
    return (
        f"the environment of actor {spec.actor} ({', '.join(spec.extras) or 'no extras'}) is not built: "
        f"{spec.root} is missing or incomplete; run `rl-actor-envs prefetch --only {spec.actor}` on every "
        f"machine that runs the actor, or set {SYSTEM_FLAG}=1 to run every actor on the driver's interpreter"
    )


def _driver_interpreter(actor: str) -> str:
    if not sys.executable:
        raise ActorEnvironmentError(
            f"actor {actor} runs on the driver's interpreter, but this process does not know its own path; "
            f"start the driver with a python executable",
            actor=actor,
        )
    return sys.executable
