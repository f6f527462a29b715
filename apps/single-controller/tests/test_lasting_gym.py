"""A Gym that dies is started again as often as it may; who tries again gets rollouts from the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from rl_app_single_controller.lasting_gym import GymLost, LastingGym
from rl_gym_bridge.failures import GymError, GymServerDied
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

REQUEST = RolloutRequest("train/0/0", "train/0", "row", "agent", {})
SAMPLE = Trajectory((Turn((1,), (2,), (-0.5,)),), 1.0, StopReason.STOP, "train/0", "train/0/0")


class Gym:
    """Lives until it is told to die; says how it was ended."""

    def __init__(self, *, raises: bool = False) -> None:
        self.dead = False
        self.raises = raises
        self.ended = 0

    def death(self) -> GymServerDied:
        return GymServerDied("the verifier is gone", component="gym")

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        await asyncio.sleep(0)
        if self.dead and self.raises:
            raise self.death()
        for request in requests:
            failure = RolloutFailure("train/0", "train/0/0", "agent", FailureKind.INFRA, "connection refused")
            yield RolloutResult(request, failure if self.dead else SAMPLE)

    def health_check(self) -> str:
        if self.dead:
            raise self.death()
        return "all well"

    def shutdown(self) -> None:
        self.ended += 1
        if self.dead:
            raise GymServerDied("it had died before", component="gym")


class Starts:
    """Starts Gyms, unless it is told that the next ones fail."""

    def __init__(self) -> None:
        self.made: list[Gym] = []
        self.fails = 0

    def __call__(self) -> Gym:
        if self.fails:
            self.fails -= 1
            raise GymError("no port is free", component="gym")
        self.made.append(Gym())
        return self.made[-1]


def played(gym: LastingGym) -> list[RolloutResult]:
    async def all_of_them() -> list[RolloutResult]:
        return [result async for result in gym.run_rollouts([REQUEST])]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("raises", [False, True], ids=["its answers fail", "its stream fails"])
def test_after_a_death_the_next_rollouts_are_of_another_gym(raises):
    first, start, said = Gym(raises=raises), Starts(), []
    gym = LastingGym(first, start, restarts=2, say=said.append)
    assert played(gym)[0].outcome is SAMPLE
    first.dead = True
    if raises:
        with pytest.raises(GymServerDied):
            played(gym)
    else:
        assert isinstance(played(gym)[0].outcome, RolloutFailure)
    assert played(gym)[0].outcome is SAMPLE
    assert len(start.made) == gym.restarted == 1
    assert first.ended == 1, "what is left of it is ended"
    assert len(said) == 1
    assert "the verifier is gone" in said[0]
    gym.close()
    assert start.made[0].ended == 1
    assert first.ended == 1, "the first is its owner's"


def test_a_failure_of_a_gym_that_lives_starts_nothing():
    class Flaky(Gym):
        def health_check(self) -> str:
            return "all well"

    first, start = Flaky(), Starts()
    gym = LastingGym(first, start, restarts=2)
    first.dead = True
    assert isinstance(played(gym)[0].outcome, RolloutFailure)
    assert start.made == []
    assert first.ended == 0


def test_many_that_find_it_dead_start_one():
    first, start = Gym(), Starts()
    gym = LastingGym(first, start, restarts=5)
    first.dead = True

    async def many() -> None:
        async def one() -> None:
            async for _ in gym.run_rollouts([REQUEST]):
                pass

        await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(many())
    assert len(start.made) == 1


def test_starts_that_fail_count_and_then_it_is_lost_for_good():
    first, start = Gym(), Starts()
    gym = LastingGym(first, start, restarts=3)
    first.dead, start.fails = True, 2
    gym.look_after()
    assert len(start.made) == 1
    start.made[0].dead, start.fails = True, 9
    with pytest.raises(GymLost, match="was started 3 times in a row") as lost:
        gym.look_after()
    assert lost.value.__cause__ is not None
    with pytest.raises(GymLost) as again:
        played(gym)
    assert again.value is lost.value, "nobody tries again"


def test_one_that_has_lived_long_has_all_its_restarts_again(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rl_app_single_controller.lasting_gym.time.monotonic", lambda: clock[0])
    first, start = Gym(), Starts()
    gym = LastingGym(first, start, restarts=1)
    first.dead = True
    gym.look_after()
    clock[0] = 601.0
    start.made[0].dead = True
    gym.look_after()
    assert gym.restarted == 2
    start.made[1].dead = True
    with pytest.raises(GymLost):
        gym.look_after()


def test_no_restart_at_all_may_be_wanted():
    first = Gym()
    gym = LastingGym(first, Starts(), restarts=0)
    first.dead = True
    with pytest.raises(GymLost):
        gym.look_after()
