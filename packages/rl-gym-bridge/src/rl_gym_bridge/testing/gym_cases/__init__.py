"""The acceptance cases of the environments that NeMo Gym 0.4 ships: seven, each accepted and rejected."""

from __future__ import annotations

from ..cases import AcceptanceCase
from .answers import answer_cases
from .tools import tool_cases

__all__ = ["gym_cases"]


def gym_cases() -> tuple[AcceptanceCase, ...]:
    """All fourteen, two per environment."""
    return (*answer_cases(), *tool_cases())
