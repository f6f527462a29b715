"""Errors that every rank of a policy raises, so that none waits for another, told from all others."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

from .errors import PeerError, PolicyError

_AGREED = "_every_rank_of_the_policy_raised"
_Error = TypeVar("_Error", bound=BaseException)


def marked(error: _Error) -> _Error:
    """The same error, known as one that every rank raises: see :func:`is_agreed`."""
    error.__dict__[_AGREED] = True
    return error


def is_agreed(error: BaseException) -> bool:
    """Whether every rank gave up together because of ``error``, or of what it was raised from.

    Then none of them waits for another, and each may be called again.
    """
    link: BaseException | None = error
    while link is not None:
        if _AGREED in link.__dict__:
            return True
        link = link.__cause__
    return False


def is_own(error: BaseException) -> bool:
    """Whether it is more than the news that another rank has failed."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, PeerError):
            return False
        link = link.__cause__
    return True


@contextmanager
def alike() -> Generator[None]:
    """Around work that refuses the same on every rank, because all do the same with the same."""
    try:
        yield
    # Anything else may have happened to this rank alone.
    except PolicyError as error:
        marked(error)
        raise
