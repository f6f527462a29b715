"""What can be wrong with an actor's environment."""

from __future__ import annotations


class ActorEnvironmentError(RuntimeError):
    """An actor whose environment cannot be determined or used; names the actor and the remedy.

    Attributes:
        actor: fully qualified name of the actor, empty where the fault concerns all of them.
    """

    def __init__(self, message: str, *, actor: str = "") -> None:
        super().__init__(message)
        self.actor = actor


class UnknownActorError(ActorEnvironmentError):
    """An actor that neither the table nor a registration knows."""


class UndeclaredExtraError(ActorEnvironmentError):
    """An actor that asks for an extra which the container does not declare."""


class RowsError(ActorEnvironmentError):
    """A list of environments that cannot be read, is empty, or says something else than it may."""


class WorkspaceError(ActorEnvironmentError):
    """No workspace to build environments from, or one that lacks a file."""


class MissingEnvironmentError(ActorEnvironmentError):
    """An environment that has not been built, or not to its end."""


class BuildError(ActorEnvironmentError):
    """An environment that could not be built."""


class UvMissingError(BuildError):
    """There is no ``uv`` to build environments with."""


class UvError(BuildError):
    """A ``uv`` command that failed or ran past its deadline; names command, outcome and last words."""


class LockTimeoutError(BuildError):
    """Another process has been building the same environment for longer than the deadline."""


class FingerprintMismatchError(ActorEnvironmentError):
    """What environments are made from has changed since they were recorded; names each differing file."""
