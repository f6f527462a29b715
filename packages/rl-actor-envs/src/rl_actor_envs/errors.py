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


class WorkspaceError(ActorEnvironmentError):
    """The workspace that environments are built from is unknown or incomplete."""


class MissingEnvironmentError(ActorEnvironmentError):
    """An environment that has not been built, or not to its end."""


class BuildError(ActorEnvironmentError):
    """An environment could not be built; its directory is not used."""


class BuildTimeoutError(BuildError):
    """Building, or waiting for another process that builds, took too long."""


class FingerprintMismatchError(ActorEnvironmentError):
    """What the environments were built from is not what this workspace declares now."""
