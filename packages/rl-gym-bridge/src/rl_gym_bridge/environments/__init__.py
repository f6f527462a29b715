"""Ready-made in-process environments, by name."""

from __future__ import annotations

import difflib

from ..environment import EnvironmentDefinitionError, LocalEnvironment
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
        close = difflib.get_close_matches(name, _FACTORIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise EnvironmentDefinitionError(
            f"there is no ready-made environment {name!r}; {hint}known: {', '.join(environment_names())}"
        )
    return factory()
