"""One command per environment that runs its Python: ``python-ColocatedWorker``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .environment import Environment, actor_environment
from .errors import ActorEnvironmentError, MissingEnvironmentError
from .workspace import Workspace


def write_wrappers(
    directory: str | os.PathLike[str], table: Mapping[str, Sequence[str]], workspace: Workspace
) -> list[str]:
    """Write an executable ``python-<Class>`` for every actor of ``table``; returns their paths.

    Raises:
        MissingEnvironmentError: an environment is not built; then nothing is written.
        ActorEnvironmentError: two actors have one class name, or a file cannot be written.
    """
    commands: dict[str, Environment] = {}
    for actor, extras in table.items():
        command = f"python-{actor.rpartition('.')[2]}"
        if command in commands:
            raise ActorEnvironmentError(
                f"{commands[command].actor} and {actor} would both be {command}; rename one of the classes",
                actor=actor,
            )
        commands[command] = actor_environment(actor, extras, workspace)
    for environment in commands.values():
        fault = environment.fault()
        if fault is not None:
            raise MissingEnvironmentError(
                f"the environment of actor {environment.actor} is not built: {fault}; run `python -m "
                f"rl_actor_envs prefetch` first",
                actor=environment.actor,
            )
    return [_write(os.path.join(directory, name), commands[name]) for name in commands]


def _write(path: str, environment: Environment) -> str:
    import shlex

    root = shlex.quote(environment.root)
    text = (
        "#!/bin/sh\n"
        f"VIRTUAL_ENV={root}\n"
        f"UV_PROJECT_ENVIRONMENT={root}\n"
        "export VIRTUAL_ENV UV_PROJECT_ENVIRONMENT\n"
        f'exec {shlex.quote(environment.interpreter)} "$@"\n'
    )
    temporary = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except OSError as error:
        raise ActorEnvironmentError(f"{path} cannot be written ({error})", actor=environment.actor) from error
    return path
