"""The Gym of an asynchronous run: started again when it dies, for training and for measurements."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping
from typing import cast

from rl_app_core.config import SingleControllerConfig
from rl_app_core.gym_environment import StartingGym
from rl_app_core.gym_plan import GymPlan
from rl_app_core.gym_rollouts import GymRollouts
from rl_app_core.job import Loop
from rl_app_core.rollouts import HeldOutError, measure
from rl_gym_bridge.config import DeferredBaseUrls
from rl_gym_bridge.failures import GymError

from .lasting_gym import LastingGym, OneGym

Evaluate = Callable[[int], Mapping[str, float]]
# A measurement that a dying Gym has spoilt is made again so often.
_MEASUREMENTS = 3


@contextlib.contextmanager
def lasting_gym(
    loop: Loop, config: SingleControllerConfig, plan: GymPlan
) -> Generator[tuple[LastingGym, Evaluate]]:
    """The run's Gym and what measures with it, for the length of the block.

    Raises:
        GymError: a Gym that was started here did not end.
    """
    runtime = loop.runtime
    numbers = itertools.count(2)
    addresses = DeferredBaseUrls(runtime.base_urls, config.cluster.start_timeout_s)

    def start() -> OneGym:
        starting = StartingGym(plan, addresses, loop.directory.logs / f"gym-{next(numbers)}")
        try:
            return starting.wait()
        except BaseException:
            starting.close()
            raise

    gym = LastingGym(cast(OneGym, runtime.runner), start, restarts=config.async_.gym_restarts, say=loop.say)
    rollouts = GymRollouts(gym, runtime.engine, plan, seed=config.seed, check=gym.look_after)

    def evaluate(step: int) -> Mapping[str, float]:
        for left in reversed(range(_MEASUREMENTS)):
            try:
                return measure(
                    rollouts, loop.prepared.problems.held_out, step=step, evaluation=config.evaluation
                )
            except (HeldOutError, GymError):
                gym.look_after()
                if not left:
                    raise
        raise AssertionError("unreachable")

    try:
        yield gym, evaluate
    finally:
        gym.close()
