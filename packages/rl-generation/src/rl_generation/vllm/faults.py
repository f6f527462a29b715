"""vLLM's exceptions as ones that every process can read, whether or not vLLM is installed there.

They are converted in the process where they are raised: a driver would have to import vLLM to unpickle them,
which alone takes many seconds.
"""

from __future__ import annotations

from ..failures import (
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    InvalidRequestError,
)


def converted(error: BaseException, component: str, what: str) -> GenerationError:
    """The failure that stands for ``error``; its first cause is said in words.

    Only classes by their names are looked at, so that nothing of vLLM is imported.
    """
    if isinstance(error, GenerationError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    said = f"{component}: {what} failed: {causes(error)}"
    if "EngineDeadError" in names:
        return EngineDeadError(f"{component}: the engine died during {what}; start it again")
    if isinstance(error, TimeoutError):
        return DeadlineError(said)
    if names & {"VLLMValidationError", "VLLMClientError", "ValueError", "TypeError"}:
        return InvalidRequestError(said)
    if names & {"GracefulHTTPError", "EngineGenerateError", "OSError", "RuntimeError"}:
        return InfraError(said)
    return GenerationError(said)


def causes(error: BaseException) -> str:
    """The chain of an exception in one line, outermost first."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 4:
        text = str(current).strip().splitlines()
        parts.append(f"{type(current).__name__}: {text[0]}" if text else type(current).__name__)
        current = current.__cause__ or current.__context__
    return " ← ".join(parts)
