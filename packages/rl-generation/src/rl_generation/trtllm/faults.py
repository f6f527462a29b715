"""What TensorRT-LLM and Ray raise, as failures that say whose fault it is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..failures import EngineDeadError, GenerationError, RequestError

# Ray's names for a worker that is gone or never came.
_DEAD = frozenset(
    {
        "ActorDiedError",
        "ActorUnavailableError",
        "ActorUnschedulableError",
        "ActorPlacementGroupRemoved",
        "LocalRayletDiedError",
        "NodeDiedError",
        "OwnerDiedError",
        "RayActorError",
        "WorkerCrashedError",
    }
)
_REFUSED = frozenset({"RequestError"})


@contextmanager
def classified(
    component: str, action: str, otherwise: type[GenerationError] | None = None
) -> Generator[None]:
    """Pass on our own failures and deadlines; turn everything else into a failure and keep it as the cause.

    Args:
        component: name that errors begin with.
        action: what was being done, such as ``sample``.
        otherwise: what an error is, if not that of a dead engine; ``None`` looks at it.

    Raises:
        EngineDeadError: a worker is gone, or the engine is shutting down.
        RequestError: the engine refused the request.
        GenerationError: anything else; nobody knows whether it may be tried again.
    """
    try:
        yield
    except (GenerationError, TimeoutError):
        raise
    except Exception as error:
        raise _failure(component, action, error, otherwise) from error


def _failure(
    component: str, action: str, error: Exception, otherwise: type[GenerationError] | None
) -> GenerationError:
    kinds = [kind for kind in type(error).__mro__ if kind is not object]
    said = f"{component}: cannot {action}: {type(error).__name__}: {error}"
    if any(kind.__name__ in _DEAD and kind.__module__.startswith("ray.") for kind in kinds):
        return EngineDeadError(f"{said}; a worker of the engine is gone, so the engine has to be restarted")
    if isinstance(error, RuntimeError) and "shutting down" in str(error):
        return EngineDeadError(f"{said}; build a new engine")
    if otherwise is not None:
        return otherwise(said)
    if isinstance(error, ValueError) or any(
        kind.__name__ in _REFUSED and kind.__module__.startswith("tensorrt_llm.") for kind in kinds
    ):
        return RequestError(said)
    return GenerationError(said)
