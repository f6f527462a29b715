"""What can go wrong between a prompt and its tokens, by whose fault it is."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

FailureKind = Literal["infra", "data"]


class GenerationError(RuntimeError):
    """An engine that cannot do what was asked; names the backend, the input and the remedy.

    Attributes:
        kind: ``infra`` if the same request may succeed elsewhere or later, ``data`` if the request
            is at fault. What nobody classified is ``data``, so that it is loud.
    """

    kind: ClassVar[FailureKind] = "data"


class RequestError(GenerationError):
    """A request that no replica can serve."""


class InvalidRequestError(RequestError):
    """A request that asks for something malformed, unknown, or impossible to score afterwards.

    Args:
        message: what is wrong and what to do about it.
        parameter: the field at fault, empty where it is the request as a whole.
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.parameter)


class ContextOverflowError(RequestError):
    """A prompt that leaves no room for a single token.

    Args:
        component: who refuses.
        prompt_tokens: length of the prompt.
        max_context: the most tokens that prompt and completion may have together.
    """

    def __init__(self, component: str, prompt_tokens: int, max_context: int) -> None:
        super().__init__(
            f"{component}: a prompt of {prompt_tokens} tokens leaves no room in the context of "
            f"{max_context}; shorten the prompt or raise the context"
        )
        self.component = component
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's own pickling would call the constructor with the message.
        return type(self), (self.component, self.prompt_tokens, self.max_context)


class InfraError(GenerationError):
    """The engine or the way to it failed; the request may be sent again."""

    kind: ClassVar[FailureKind] = "infra"


class EngineDeadError(InfraError):
    """The engine's process is gone."""


class DeadlineError(InfraError):
    """No answer within the deadline."""


class UnschedulableError(InfraError):
    """No node has, or had in time, the resources that the engine asks for."""


class BusyError(InfraError):
    """The engine works on something that it has to finish before it can do this; it goes on as before."""


class NotReadyError(InfraError):
    """The address is reserved, and the engine behind it still loads."""


class StaleWeightsError(InfraError):
    """The replica holds old or partly written weights and serves nothing before a refit completes."""


class NoReplicaError(InfraError):
    """No replica of the fleet can serve."""


class RefitError(InfraError):
    """New weights did not arrive whole: a tensor is missing or has another shape, or a shard is silent."""


class UnavailableBackendError(GenerationError):
    """The backend's package, driver or device is missing on this machine."""
