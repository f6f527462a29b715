"""Failures as HTTP answers: one document for every backend, with the type's name and whose fault it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..failures import (
    ContextOverflowError,
    DeadlineError,
    GenerationError,
    InfraError,
    InvalidRequestError,
    RequestError,
)

RETRY_AFTER_S = 1
"""Seconds after which a client may ask a server again that was not ready."""


class UnknownModelError(InvalidRequestError):
    """The server does not serve a model of that name."""


class UnknownRouteError(InvalidRequestError):
    """The server has no such address, or not with that method."""


class BodyTooLargeError(InvalidRequestError):
    """The request, or the texts in it, are larger than the server reads."""


class UnauthorizedError(RequestError):
    """The request carries no token, or another one."""


class AbortedError(InfraError):
    """The engine gave the request up before it was complete; what it had sampled is no sample."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it is sent.

    Attributes:
        status: HTTP status.
        document: ``{"error": {message, type, param, code, kind}}``.
        headers: beside those of every answer.
    """

    status: int
    document: dict[str, Any]
    headers: dict[str, str]


def refusal_of(error: Exception) -> Refusal:
    """The answer to a request that failed with ``error``.

    ``type`` is the name of the class in :mod:`rl_generation.failures` or here, ``kind`` is ``data`` where the
    request is at fault and ``infra`` where it may be sent again. What nobody typed is a 500 without its text,
    which might hold anything.
    """
    status = _status(error)
    kind = error.kind if isinstance(error, GenerationError) else "data"
    headers: dict[str, str] = {}
    if status == 503:
        headers["retry-after"] = str(RETRY_AFTER_S)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    detail = {
        "message": _message(error),
        "type": type(error).__name__ if isinstance(error, GenerationError) else "InternalError",
        "param": (error.parameter or None) if isinstance(error, InvalidRequestError) else None,
        "code": status,
        "kind": kind,
    }
    return Refusal(status, {"error": detail}, headers)


def _status(error: Exception) -> int:
    if isinstance(error, UnauthorizedError):
        return 401
    if isinstance(error, (UnknownModelError, UnknownRouteError)):
        return 404
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, RequestError):
        return 400
    if isinstance(error, DeadlineError):
        return 504
    return 503 if isinstance(error, InfraError) else 500


def _message(error: Exception) -> str:
    if isinstance(error, ContextOverflowError):
        # NeMo Gym tells a full context from other faults by the words "context length".
        return f"{error} (this model's maximum context length is {error.max_context} tokens)"
    if isinstance(error, GenerationError):
        return str(error)
    return f"the server failed with {type(error).__name__}; its log says more"
