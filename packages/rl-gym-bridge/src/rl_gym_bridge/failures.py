"""What can go wrong between a trainer and Gym, as typed errors that survive pickling.

Every error says whose fault it is: INFRA faults may be retried or dispatched again, DATA faults are the
row's, the environment's or the answer's. An error that nobody classified counts as DATA, so that it is loud.
"""

from __future__ import annotations

from typing import Any

from .trajectory import FailureKind


class GymError(RuntimeError):
    """Base of the bridge's errors.

    Attributes:
        kind: who is at fault.
        component: the part that failed (``policy_model``, ``mcqa_simple_agent``, ``head server``, …).
        problem: what happened.
        remedy: what to do about it, possibly empty.
        address: URL or path concerned, possibly empty.
        attempts: how often it was tried.
        elapsed_s: seconds spent on it in total.
    """

    kind: FailureKind = FailureKind.DATA

    def __init__(
        self,
        problem: str,
        *,
        component: str = "",
        address: str = "",
        attempts: int = 1,
        elapsed_s: float = 0.0,
        remedy: str = "",
    ) -> None:
        self.problem = problem
        self.component = component
        self.address = address
        self.attempts = attempts
        self.elapsed_s = elapsed_s
        self.remedy = remedy
        super().__init__(self._message())

    def _message(self) -> str:
        where = " at ".join(part for part in (self.component, self.address) if part)
        tried = f" (attempt {self.attempts}, {self.elapsed_s:.1f} s)" if self.elapsed_s else ""
        return (
            f"{where + ': ' if where else ''}{self.problem}{tried}{'; ' + self.remedy if self.remedy else ''}"
        )

    def _details(self) -> dict[str, Any]:
        """Keyword arguments that, with ``problem``, make an equal error."""
        return {
            "component": self.component,
            "address": self.address,
            "attempts": self.attempts,
            "elapsed_s": self.elapsed_s,
            "remedy": self.remedy,
        }

    def with_details(self, problem: str | None = None, **changes: Any) -> GymError:
        """An error of the same class and cause, made with these arguments of the constructor instead."""
        changed = _rebuild(type(self), problem or self.problem, {**self._details(), **changes})
        changed.__cause__ = self.__cause__
        return changed

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.problem, self._details())


def _rebuild(cls: type[GymError], problem: str, details: dict[str, Any]) -> GymError:
    return cls(problem, **details)


class GymConfigError(GymError):
    """Settings that cannot be used; ``component`` is the dotted name of the setting."""


class GymStartError(GymError):
    """Gym did not become ready."""

    kind = FailureKind.INFRA


class GymServerDied(GymError):
    """A Gym process that was running is gone, or does not answer any more; ``component`` names the server."""

    kind = FailureKind.INFRA


class GymStateUnknown(GymError):
    """Whether a Gym process runs cannot be seen now, for want of file descriptors: it need not be dead."""

    kind = FailureKind.INFRA


class GymUnavailable(GymError):
    """A request that never reached the server: nothing was executed."""

    kind = FailureKind.INFRA


class GymConnectionLost(GymError):
    """The connection broke after the request may have been delivered: it may have been executed."""

    kind = FailureKind.INFRA


class GymTimeout(GymError):
    """A deadline passed."""

    kind = FailureKind.INFRA


class GymStopped(GymError):
    """A rollout that was ended from outside before it had an answer; it may have been executed."""

    kind = FailureKind.INFRA


class GymHttpError(GymError):
    """An answer with an error status.

    Attributes:
        status: HTTP status.
        body: beginning of the answer's text.
        inner_status: status of another server, in a body that passes its error on; ``None`` where none is.
    """

    INFRA_STATUSES = frozenset({408, 425, 429})

    def __init__(
        self, problem: str, *, status: int, body: str = "", inner_status: int | None = None, **details: Any
    ) -> None:
        self.status = status
        self.body = body
        self.inner_status = inner_status
        super().__init__(problem, **details)

    @property
    def kind(self) -> FailureKind:  # type: ignore[override]
        """INFRA for 408, 425, 429 and every 5xx, DATA for the rest; by the inner status if there is one."""
        status = self.inner_status or self.status
        infra = status >= 500 or status in self.INFRA_STATUSES
        return FailureKind.INFRA if infra else FailureKind.DATA

    def _details(self) -> dict[str, Any]:
        return {
            **super()._details(),
            "status": self.status,
            "body": self.body,
            "inner_status": self.inner_status,
        }


class GymAnswerError(GymError):
    """An answer that arrived whole and cannot be used: no JSON, no such field, tokens that do not fit."""


class GymTokenError(GymAnswerError):
    """Token ids, log-probabilities, versions or routed experts that are missing or do not correspond."""


class GymContinuityError(GymTokenError):
    """A prompt that does not extend the tokens that the rollout already has.

    Attributes:
        turn: the turn whose prompt it is, counted from 1.
        index: position of the first token that differs.
        got: the prompt's token there, ``None`` where the prompt ends too early.
        want: the token that the rollout has there.
    """

    def __init__(
        self, problem: str, *, turn: int, index: int, got: int | None, want: int, **details: Any
    ) -> None:
        self.turn = turn
        self.index = index
        self.got = got
        self.want = want
        super().__init__(problem, **details)

    def _details(self) -> dict[str, Any]:
        return {
            **super()._details(),
            "turn": self.turn,
            "index": self.index,
            "got": self.got,
            "want": self.want,
        }


class GymNoTokensError(GymAnswerError):
    """A finished rollout without a single sampled token: there is nothing to train."""


class GymRewardError(GymAnswerError):
    """A reward, or a part of one, that is no finite number within bounds or contradicts the rest."""


class GymInvalidSample(GymAnswerError):
    """Gym itself says that the reward of its answer measures nothing: a judge is down, a session was lost.

    Attributes:
        failure_kind: Gym's name for what went wrong, empty where it gave none.
        infra: whether machinery is at fault rather than the row.
    """

    def __init__(self, problem: str, *, failure_kind: str = "", infra: bool = False, **details: Any) -> None:
        self.failure_kind = failure_kind
        self.infra = infra
        super().__init__(problem, **details)

    @property
    def kind(self) -> FailureKind:  # type: ignore[override]
        """INFRA where machinery is at fault."""
        return FailureKind.INFRA if self.infra else FailureKind.DATA

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "failure_kind": self.failure_kind, "infra": self.infra}


class RolloutCountError(GymError):
    """A batch of rollouts that came back incomplete, twice, mixed up or for rows that nobody asked for.

    Attributes:
        missing: ids of the rollouts that were asked for and did not come.
    """

    def __init__(self, problem: str, *, missing: tuple[str, ...] = (), **details: Any) -> None:
        self.missing = missing
        super().__init__(problem, **details)

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "missing": self.missing}


def kind_of(error: BaseException) -> FailureKind:
    """Whose fault an error is; what is not known is DATA."""
    kind = getattr(error, "kind", None)
    return kind if isinstance(kind, FailureKind) else FailureKind.DATA
