"""One attempt of a rollout: what is sent, what an error status means, and whether another may follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .answers.parsing import beginning
from .failures import GymError, GymHttpError, GymUnavailable, kind_of
from .inner_errors import inner_status
from .retry import REPEATED_STATUSES
from .trajectory import FailureKind
from .transport.base import HttpAnswer

#: Characters of an error's body that its message shows, and that the error keeps.
SHOWN_OF_ERROR, KEPT_OF_ERROR = 500, 2000


class Progress:
    """What is known of a rollout while it runs: its attempts, and when the first one began."""

    __slots__ = ("_began", "attempts")

    def __init__(self) -> None:
        self.attempts = 0
        self._began = 0.0

    def begin(self, now: float) -> None:
        if not self.attempts:
            self._began = now
        self.attempts += 1

    def elapsed_s(self, now: float) -> float:
        return now - self._began if self.attempts else 0.0


def encoded(body: Mapping[str, Any]) -> bytes:
    """The document that is sent.

    Raises:
        GymError: it cannot be written as JSON.
    """
    try:
        return json.dumps(dict(body), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise GymError(f"the request cannot be written as JSON ({error})") from error


def http_error(answer: HttpAnswer) -> GymHttpError:
    """The error of an answer whose status is no success."""
    shown = beginning(answer.body, SHOWN_OF_ERROR)
    redirect = " (a redirect, which is not followed)" if 300 <= answer.status < 400 else ""
    inner = inner_status(answer.body) if answer.status == 500 else None
    return GymHttpError(
        f"answered {answer.status}{redirect}{': ' + shown if shown else ''}",
        status=answer.status,
        body=beginning(answer.body, KEPT_OF_ERROR),
        inner_status=inner,
    )


def may_be_repeated(failure: GymError) -> bool:
    """Whether Gym can be working on the rollout no more, and might do better another time."""
    if isinstance(failure, GymHttpError):
        return failure.status in REPEATED_STATUSES and kind_of(failure) is FailureKind.INFRA
    return isinstance(failure, GymUnavailable)


def last_error(failure: GymError, first: GymError | None) -> GymError:
    """``failure``, with the first one as its cause, and in words where they differ."""
    if first is None:
        return failure
    if first.problem != failure.problem:
        failure = failure.with_details(f"{failure.problem}; at first: {first.problem}")
    failure.__cause__ = first
    return failure
