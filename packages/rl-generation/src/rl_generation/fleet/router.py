"""Which replica gets the next request: a healthy one with the fewest outstanding, in turn among equals."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass

from ..failures import NoReplicaError
from .states import ReplicaMachine, ReplicaState


@dataclass(slots=True, eq=False)
class Endpoint:
    """One replica in the router.

    Attributes:
        machine: its state.
        outstanding: requests sent to it and not yet answered.
        turn: when it was last chosen, in choices.
        sent: requests sent to it so far.
    """

    machine: ReplicaMachine
    outstanding: int = 0
    turn: int = 0
    sent: int = 0

    @property
    def name(self) -> str:
        """Of the replica."""
        return self.machine.name


class Router:
    """Knows the endpoints and splits work among the healthy ones. Belongs to one event loop.

    What is not healthy gets nothing, so the first failure of a replica is its quarantine.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._choices = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._open = True

    @property
    def serving(self) -> list[str]:
        """Names of the replicas that are given requests."""
        return [e.name for e in self._endpoints.values() if self._serves(e)]

    @property
    def is_open(self) -> bool:
        """Whether requests are handed out at all."""
        return self._open

    def add(self, machine: ReplicaMachine) -> Endpoint:
        """Know a replica; one that was removed before starts from nothing.

        Raises:
            ValueError: its name is taken.
        """
        if machine.name in self._endpoints:
            raise ValueError(f"router: there is a replica {machine.name!r} already; remove it first")
        endpoint = self._endpoints[machine.name] = Endpoint(machine, turn=self._choices)
        machine.listen(lambda old, new: self.wake())
        self.wake()
        return endpoint

    def remove(self, name: str) -> None:
        """Forget a replica; its outstanding requests may still be answered."""
        self._endpoints.pop(name, None)
        self.wake()

    def set_open(self, open_: bool) -> None:
        """Hand out requests, or let them wait."""
        self._open = open_
        self.wake()

    def split(self, count: int) -> dict[str, int]:
        """How many of ``count`` requests each replica gets, and counts them as outstanding.

        Each goes, one after the other, to the healthy replica with the fewest outstanding requests and
        among those to the one that was chosen least recently.

        Raises:
            NoReplicaError: none is healthy.
        """
        heap = [(e.outstanding, e.turn, name) for name, e in self._endpoints.items() if self._serves(e)]
        if not heap:
            raise NoReplicaError(f"fleet: no replica can serve ({self.describe()})")
        heapq.heapify(heap)
        shares: dict[str, int] = {}
        for _ in range(count):
            outstanding, _, name = heap[0]
            self._choices += 1
            heapq.heapreplace(heap, (outstanding + 1, self._choices, name))
            shares[name] = shares.get(name, 0) + 1
            self._endpoints[name].turn = self._choices
        for name, share in shares.items():
            self._endpoints[name].outstanding += share
            self._endpoints[name].sent += share
        return shares

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of a replica. Who splits keeps it, to give back what is outstanding there."""
        return self._endpoints[name]

    async def wait_serving(self, timeout_s: float) -> None:
        """Return once a replica can serve.

        Raises:
            NoReplicaError: none could within ``timeout_s``, or all are retired.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not any(self._serves(e) for e in self._endpoints.values()):
            if all(e.machine.state is ReplicaState.RETIRED for e in self._endpoints.values()):
                raise NoReplicaError(f"fleet: no replica is left ({self.describe()}); build a new fleet")
            left = deadline - loop.time()
            if left <= 0:
                raise NoReplicaError(
                    f"fleet: no replica could serve for {timeout_s:.3g} s ({self.describe()}); a stale one "
                    "serves after the next refit; raise replica_wait_s if that comes later"
                )
            await self.wait_change(left)

    async def wait_change(self, timeout_s: float) -> None:
        """Return after the next change of a state, or after ``timeout_s``."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._waiting.discard(waiter)
            waiter.cancel()

    def wake(self) -> None:
        """Let everything that waits look again."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def describe(self) -> str:
        """Every replica's state, for error texts."""
        states = (
            ", ".join(f"{name} {e.machine.state}" for name, e in self._endpoints.items()) or "no replicas"
        )
        return states if self._open else f"{states}; the fleet is paused"

    def _serves(self, endpoint: Endpoint) -> bool:
        return self._open and endpoint.machine.state is ReplicaState.HEALTHY
