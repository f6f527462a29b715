"""The actors that are known: those of the table, and those that other distributions register."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from .errors import ActorEnvironmentError, UndeclaredExtraError, UnknownActorError
from .table import ACTOR_ENVIRONMENTS, DECLARED_EXTRAS, undeclared_extras


class ActorRegistry:
    """Actors and their extras.

    Args:
        table: fully qualified class → extras in order, or ``None`` for the driver's interpreter.
        declared: the extras that exist.

    Raises:
        UndeclaredExtraError: an actor of the table asks for another one.
    """

    def __init__(
        self,
        table: Mapping[str, Sequence[str] | None] = ACTOR_ENVIRONMENTS,
        declared: Collection[str] = DECLARED_EXTRAS,
    ) -> None:
        self._declared = tuple(declared)
        self._extras: dict[str, tuple[str, ...] | None] = {}
        for actor, extras in table.items():
            self.register(actor, extras)

    def register(self, actor: str, extras: Sequence[str] | None) -> None:
        """Add an actor; adding it again with the same extras changes nothing.

        Args:
            actor: fully qualified class name.
            extras: in order, or ``None`` for the driver's interpreter.

        Raises:
            UndeclaredExtraError: an extra that does not exist.
            ActorEnvironmentError: not a dotted class name, extras given as one string, or an actor
                known with other extras.
        """
        if "." not in actor or not all(part.isidentifier() for part in actor.split(".")):
            raise ActorEnvironmentError(
                f"{actor!r} is not the full name of a class; write it as package.module.Class", actor=actor
            )
        if isinstance(extras, str):
            raise ActorEnvironmentError(f"extras of {actor} are a string; write [{extras!r}]", actor=actor)
        for _, extra in undeclared_extras({actor: extras}, self._declared):
            raise UndeclaredExtraError(
                f"actor {actor} asks for the extra {extra!r}, which apps/container does not declare "
                f"(declared: {', '.join(self._declared)}); declare it there or correct the actor's extras",
                actor=actor,
            )
        wanted = None if extras is None else tuple(extras)
        if self._extras.get(actor, wanted) != wanted:
            raise ActorEnvironmentError(
                f"actor {actor} is already registered with {self._extras[actor]}, not {wanted}; "
                f"an actor has one environment",
                actor=actor,
            )
        self._extras[actor] = wanted

    def extras_of(self, actor: str) -> tuple[str, ...] | None:
        """The actor's extras in order; ``None`` means the driver's interpreter.

        Raises:
            UnknownActorError: the actor is not known; the message suggests the closest.
        """
        if actor not in self._extras:
            raise UnknownActorError(
                f"actor {actor!r} has no environment; {self._suggestion(actor)}"
                f"add it to rl_actor_envs.table, or call register_actor_environment before using it",
                actor=actor,
            )
        return self._extras[actor]

    def _suggestion(self, actor: str) -> str:
        # Only a failing look-up needs it, and this package is imported in every worker.
        from difflib import get_close_matches

        close = get_close_matches(actor, self._extras, n=1)
        return f"did you mean {close[0]!r}? Otherwise " if close else ""


@cache
def shared_registry() -> ActorRegistry:
    """The registry of this process, built from the table on first use."""
    return ActorRegistry()


def register_actor_environment(actor: str, extras: Sequence[str] | None) -> None:
    """Make an actor outside the table known in this process; see :meth:`ActorRegistry.register`."""
    shared_registry().register(actor, extras)
