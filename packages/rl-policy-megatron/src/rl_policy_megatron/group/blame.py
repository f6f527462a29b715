"""Which of several ranks' failures came first in truth, and which only followed from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.distributed as dist

from ..errors import PeerError, RankError, RendezvousError

# How gloo, NCCL and the store speak of a rank that is gone, where the class of the error does not say so.
_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo/", "nccl error")
# How gloo, NCCL and the store say that they have waited in vain; gloo and the store tell how long.
_LATE = re.compile(
    r"timed out waiting (?:(\d+) ?ms )?for (?:send|recv)|wait timeout after (\d+) ?ms"
    r"|application timeout caused|(?:nccl|processgroup|collective operation).*(?:timed out|timeout)",
    re.DOTALL,
)
# How a rank speaks of another's failure; who passes it on names the rank itself.
_PASSED_ON = re.compile(r"rank \d+( of \d+)? failed: ")


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank answered instead of a result.

    Attributes:
        rank: its number.
        text: what happened, in one line.
        cause: the error.
        answered: whether the rank itself raised ``cause``, and so lives on.
        follows: whether it says no more than that another rank failed.
        named: the rank that failed according to it; -1 where it does not know.
        waited_s: how long it has waited for others in a collective, if that is what went wrong; 0 where it
            does not tell.
    """

    rank: int
    text: str
    cause: BaseException | None
    answered: bool = False
    follows: bool = False
    named: int = -1
    waited_s: float | None = None

    def original(self, call: str, world: int) -> Exception | None:
        """The error as the rank raised it, if it could be brought here and tells what went wrong."""
        from ray.exceptions import RayError

        cause = self.cause
        if self.follows or not isinstance(cause, Exception) or isinstance(cause, RayError | RankError):
            return None
        cause.add_note(f"{type(cause).__name__} of {call}, raised on rank {self.rank} of {world}")
        return cause

    def raised(self, call: str, world: int) -> RankError:
        """The error that the caller gets, with its cause."""
        rank = self.rank if self.named < 0 else self.named
        error = RankError(f"rank {rank} of {world}: {self.text}", rank, call, answered=self.answered)
        error.__cause__ = self.cause
        return error


def failure_of(rank: int, call: str, error: BaseException) -> Failure:
    """A failure for what waiting for a rank's answer raised.

    Args:
        rank: that was asked.
        call: the method.
        error: of Ray, or what the rank itself raised.
    """
    from ray.exceptions import RayActorError, RayTaskError, UnserializableException

    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, Exception) else error
        if cause is not error:
            # It has lost its own on the way; Ray's text tells where on the rank it was raised.
            cause.__cause__ = error
        return _own(rank, call, cause)
    if isinstance(error, RayActorError):
        return dead(rank, call, error)
    if isinstance(error, UnserializableException):
        last = str(error).strip().splitlines()[-1].strip()
        return Failure(
            rank, f"{call} failed, and its error cannot be read here: {last}", error, answered=True
        )
    return Failure(rank, f"{call} was lost: {type(error).__name__}: {_first_line(error)}", error)


def dead(rank: int, call: str, error: BaseException | None = None) -> Failure:
    """The failure of a rank whose process is gone."""
    reason = "" if error is None else f": {_first_line(error)}"
    return Failure(rank, f"it died during {call}{reason} (killed, or out of memory?)", error)


def first_of(failures: list[Failure]) -> Failure:
    """The one to blame: the earliest that follows from no other, else the most telling of the rest.

    Args:
        failures: in the order in which they came; at least one.
    """
    for failure in failures:
        if not failure.follows:
            return failure
    return next((failure for failure in failures if failure.named >= 0), failures[0])


def _own(rank: int, call: str, cause: Exception) -> Failure:
    from ray.exceptions import RaySystemError

    text = f"{call} failed: {type(cause).__name__}: {cause}"
    if isinstance(cause, RankError):
        # It stands for what could not be brought here, and says so.
        text = str(cause)
    if isinstance(cause, RaySystemError):
        text = (
            f"{call} was not begun, its arguments cannot be read there: {_first_line(cause)}; what is sent "
            "to ranks comes from a module that they can import, or from the script itself"
        )
    if isinstance(cause, PeerError):
        text = f"{call} failed: {_PASSED_ON.sub('', str(cause), count=1)}"
        return Failure(rank, text, cause, answered=True, follows=True, named=cause.rank)
    if isinstance(cause, RendezvousError):
        missing = next(iter(cause.missing), -1)
        return Failure(rank, text, cause, answered=True, follows=True, named=missing)
    spoken = str(cause).lower()
    gone = isinstance(cause, RuntimeError) and any(words in spoken for words in _GONE)
    follows = gone or isinstance(cause, dist.DistError)
    late = _LATE.search(spoken) if isinstance(cause, RuntimeError) else None
    if late is None:
        return Failure(rank, text, cause, answered=True, follows=follows)
    waited_s = int(next((number for number in late.groups() if number), 0)) / 1000
    return Failure(rank, text, cause, answered=True, follows=True, waited_s=waited_s)


def _first_line(error: BaseException) -> str:
    """Ray's texts go on for pages; the line that tells how a process ended is not always the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return next(iter(telling or lines), type(error).__name__)
