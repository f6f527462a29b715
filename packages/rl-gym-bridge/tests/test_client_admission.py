"""The limit on what runs at the same time, and the deadline of a block."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time

import pytest

from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.transport import descriptors
from rl_gym_bridge.transport.admission import Admission
from rl_gym_bridge.transport.deadline import Deadline


def test_admission_is_in_order_of_arrival() -> None:
    async def main() -> None:
        admission, order = Admission(2), []

        async def one(index: int) -> None:
            async with admission:
                order.append(index)
                await asyncio.sleep(0)

        await asyncio.gather(*(one(index) for index in range(50)))
        assert order == list(range(50))

    asyncio.run(main())


def test_a_newcomer_does_not_overtake_whoever_was_just_given_the_place() -> None:
    async def main() -> None:
        admission, order = Admission(1), []

        async def one(name: str) -> None:
            async with admission:
                order.append(name)

        await admission.__aenter__()
        waiting = asyncio.ensure_future(one("waiting"))
        await asyncio.sleep(0)
        await admission.__aexit__(None, None, None)
        await one("newcomer")
        await waiting
        assert order == ["waiting", "newcomer"]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_cancelling_at_any_moment_loses_no_place_and_makes_none(seed: int) -> None:
    async def main() -> None:
        rng, admission, running, peak = random.Random(seed), Admission(3), 0, 0

        async def one() -> None:
            nonlocal running, peak
            async with admission:
                running += 1
                peak = max(peak, running)
                try:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    running -= 1

        tasks = [asyncio.ensure_future(one()) for _ in range(60)]
        for _ in range(30):
            await asyncio.sleep(0)
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert peak == 3
        # A place given to a waiter that is cancelled in the same turn is passed on.
        await admission.__aenter__()
        await admission.__aenter__()
        await admission.__aenter__()
        first, second = (asyncio.ensure_future(admission.__aenter__()) for _ in range(2))
        await asyncio.sleep(0)
        await admission.__aexit__(None, None, None)
        first.cancel()
        await asyncio.wait_for(second, 1)

    asyncio.run(main())


def test_a_limit_that_lets_nothing_run_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        Admission(0)


def test_a_deadline_is_a_timeout_and_a_cancellation_stays_one() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match=r"0\.01 s"), Deadline(0.01):
            await asyncio.sleep(5)
        with Deadline(5):
            await asyncio.sleep(0)

        async def one() -> None:
            with Deadline(5):
                await asyncio.sleep(5)

        task = asyncio.ensure_future(one())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(KeyError), Deadline(5):
            raise KeyError

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not count cancellations")
def test_a_cancellation_in_the_moment_of_the_deadline_is_not_lost() -> None:
    async def main() -> None:
        async def one() -> None:
            with Deadline(0.003):
                await asyncio.sleep(5)

        task = asyncio.ensure_future(one())
        asyncio.get_running_loop().call_later(0.003, task.cancel)
        asyncio.get_running_loop().call_soon(time.sleep, 0.02)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_of_two_nested_deadlines_the_one_that_passed_is_named() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match=r"0\.02 s"), Deadline(0.02), Deadline(5):
            await asyncio.sleep(5)
        with pytest.raises(TimeoutError, match=r"0\.01 s"), Deadline(5), Deadline(0.01):
            await asyncio.sleep(5)
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_connections_are_bounded_by_the_limit_on_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "_open_files", lambda: 10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert descriptors.affordable_connections(900) == 900
    assert caplog.records == []
    assert descriptors.affordable_connections(5000) == 1024 - 10 - descriptors.RESERVE
    (line,) = caplog.records
    assert "ulimit -n 5074" in line.getMessage()
    assert "4096" in line.getMessage()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert descriptors.affordable_connections(10**6) == 10**6
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    with pytest.raises(GymConfigError, match="ulimit"):
        descriptors.affordable_connections(5)
    with pytest.raises(GymConfigError, match="below 1"):
        descriptors.affordable_connections(0)
