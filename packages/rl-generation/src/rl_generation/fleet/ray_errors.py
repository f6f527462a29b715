"""What Ray raises, as failures that say whose fault it was."""

from __future__ import annotations

from ..failures import EngineDeadError, GenerationError, InfraError


def typed(error: Exception, name: str, method: str) -> Exception:
    """A failure for what a call to an actor raised, with the first cause kept.

    What the actor itself raised keeps its own class if it is a
    :class:`~rl_generation.failures.GenerationError`; anything else that it raised is nobody's known fault, so
    it is ``data``, which is loud.

    Args:
        error: from a call to an actor.
        name: of the replica.
        method: that was called.
    """
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, GenerationError):
            return cause
        failed = GenerationError(
            f"replica {name}: {method} failed: {type(cause).__name__}: {first_line(cause)}"
        )
        failed.__cause__ = cause
        return failed
    problem: GenerationError
    if isinstance(error, ActorUnavailableError):
        problem = InfraError(f"replica {name}: {method}: its node does not answer: {first_line(error)}")
    elif isinstance(error, RayActorError):
        problem = EngineDeadError(f"replica {name}: it died during {method}: {_why(error)}")
    elif isinstance(error, RayError):
        problem = InfraError(
            f"replica {name}: {method} was lost: {type(error).__name__}: {first_line(error)}"
        )
    else:
        return error
    problem.__cause__ = error
    return problem


def first_line(error: Exception) -> str:
    """The first line of an exception's text; Ray's go on for pages."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _why(error: Exception) -> str:
    """The line of Ray's text that says how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (telling or lines or ["killed, or out of memory?"])[0]
