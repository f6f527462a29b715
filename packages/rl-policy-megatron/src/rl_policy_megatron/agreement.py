"""How ranks agree about failures, so that none waits in a collective for one that gave up."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from . import cpu_adapter
from .errors import PeerError
from .placement import RankGroup
from .refusals import marked

_MESSAGE_BYTES = 4096
# No operation has these numbers.
_DONE, _FAILED = 0, 1 << 62


def raise_together(ranks: RankGroup, error: BaseException | None) -> None:
    """Return on every rank if none has an error; else raise on every rank. A collective.

    Raises:
        BaseException: this rank's own ``error``, unchanged.
        PeerError: another rank has one; names the lowest such rank and tells its error.
    """
    if ranks.size == 1:
        if error is not None:
            raise error
        return
    device = cpu_adapter.device()
    # A rank that failed only because another did is no cause.
    is_cause = error is not None and not isinstance(error, PeerError)
    flags = torch.full((ranks.size,), 0, dtype=torch.int64, device=device)
    flags[ranks.rank] = 2 if is_cause else int(error is not None)
    told = ranks.sum(flags).tolist()
    if not any(told):
        return
    source = told.index(2) if 2 in told else told.index(1)
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    if ranks.rank == source:
        # What a peer's error says has named its rank already.
        text = (f"{type(error).__name__}: {error}" if is_cause else str(error)).encode()[:_MESSAGE_BYTES]
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    cause = bytes(ranks.broadcast(message, source).cpu().tolist()).rstrip(b"\0").decode(errors="ignore")
    if is_cause and error is not None:
        raise marked(error)
    raise marked(
        PeerError(f"rank {source} of {ranks.size} failed: {cause}" if 2 in told else cause, rank=source)
    )


@contextmanager
def agreed(ranks: RankGroup) -> Generator[None]:
    """Around work without collectives that may fail on some ranks only; all leave it, or all raise.

    Raises:
        BaseException: this rank's own error, unchanged.
        PeerError: another rank's.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_together(ranks, failure)


class Lockstep:
    """Holds the members of a tensor-parallel group to the same calls within one loss function.

    Every call that needs a collective is announced first. If a member failed instead, or does
    something else, all learn of it there and none enters the collective.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._broken: PeerError | None = None
        self._ended = False

    def enter(self, operation: int) -> None:
        """Before the collectives of an operation; ``operation`` ≠ 0 tells it from others.

        Raises:
            PeerError: another member does not do the same.
        """
        if self._ranks.size == 1:
            return
        if self._broken is not None:
            raise self._broken
        if self._ended:
            raise PeerError("log-probabilities were asked for after the loss function had ended", rank=-1)
        self._meet(operation)
        if self._broken is not None:
            raise self._broken

    @contextmanager
    def section(self) -> Generator[None]:
        """Around the loss function; whatever happens in it is known to all members at its end.

        Raises:
            PeerError: this member's own work went well and another's did not.
        """
        try:
            yield
        except BaseException:
            self._end(_FAILED)
            raise
        self._end(_DONE)
        if self._broken is not None:
            raise self._broken

    def _end(self, code: int) -> None:
        self._ended = True
        if self._ranks.size > 1 and self._broken is None:
            self._meet(code)

    def _meet(self, code: int) -> None:
        codes = torch.zeros(self._ranks.size, dtype=torch.int64, device=cpu_adapter.device())
        codes[self._ranks.rank] = code
        met = self._ranks.sum(codes).tolist()
        if _FAILED in met or len(set(met)) > 1:
            member = met.index(_FAILED) if _FAILED in met else next(i for i, c in enumerate(met) if c != code)
            happened = "failed" if _FAILED in met else "asked for other numbers than this one"
            self._broken = PeerError(
                f"the loss function {happened} on tensor-parallel rank {member} of {self._ranks.size}; "
                "it must be the same function with the same batch on every rank",
                rank=member,
            )
