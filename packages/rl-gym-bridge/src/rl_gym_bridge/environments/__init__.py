"""Ready-made in-process environments, by name."""

from __future__ import annotations

from ..environment import EnvironmentDefinitionError, LocalEnvironment
from ..suggestions import did_you_mean
from .calculator import calculator
from .exact_answer import exact_answer
from .final_number import final_number

__all__ = ["calculator", "environment_names", "exact_answer", "final_number", "get_environment"]

_FACTORIES = {"calculator": calculator, "exact_answer": exact_answer, "final_number": final_number}


def environment_names() -> tuple[str, ...]:
    """Names that :func:`get_environment` knows, sorted."""
    return tuple(sorted(_FACTORIES))


def get_environment(name: str) -> LocalEnvironment:
    """The ready-made environment of that name.

    Raises:
        EnvironmentDefinitionError: there is none; the message suggests the closest.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        hints = [did_you_mean(name, _FACTORIES), f"known: {', '.join(environment_names())}"]
        raise EnvironmentDefinitionError(
            f"there is no ready-made environment {name!r}; {' '.join(filter(None, hints))}"
        )
    return factory()
