"""The Gym of a run: it starts beside the engine and the policy, and ends before them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path

from rl_gym_bridge.actor_handle import NemoGymHandle
from rl_gym_bridge.config import DeferredBaseUrls
from rl_gym_bridge.endings import GRACE_S, LAYER_S
from rl_gym_bridge.factory import spinup_nemo_gym_actor
from rl_gym_bridge.failures import GymError, GymUnavailable

from .config import ConfigError
from .gym_plan import GymPlan

logger = logging.getLogger(__name__)

# Until a start that was told to end has said so, beyond the time that Gym has for it.
_MARGIN_S = GRACE_S + 2 * LAYER_S


@contextlib.contextmanager
def starting_gym(
    plan: GymPlan, base_urls: Sequence[str], *, ready_timeout_s: float, work_dir: Path
) -> Generator[StartingGym]:
    """Begin to start Gym, and end it with the block, whether it has started or not.

    Args:
        plan: of the run.
        base_urls: reserved addresses of the engine's replicas, which may still load.
        ready_timeout_s: how long the first rollout may wait until they serve.
        work_dir: where Gym's logs go if the plan does not say.

    Raises:
        GymError: it did not end; only where nothing else went wrong.
    """
    gym = StartingGym(plan, DeferredBaseUrls(tuple(base_urls), ready_timeout_s), work_dir)
    try:
        yield gym
    except BaseException:
        try:
            gym.close()
        except GymError as error:
            logger.warning("Gym, after something else went wrong: %s", error)
        raise
    gym.close()


class StartingGym:
    """A Gym that a thread starts.

    Args:
        plan: of the run.
        base_urls: of the engine.
        work_dir: where Gym's logs go if the plan does not say.
    """

    def __init__(self, plan: GymPlan, base_urls: DeferredBaseUrls, work_dir: Path) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._handle: NemoGymHandle | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gym-start")
        self._started = self._thread.submit(self._start, base_urls, work_dir)

    def wait(self) -> NemoGymHandle:
        """Gym, once all its servers answer: a :class:`~rl_gym_bridge.requests.RolloutRunner`.

        Raises:
            GymError: it did not start; nothing of it is left.
            ConfigError: it has no such agent as a row names.
        """
        handle = self._started.result()
        known = handle.health_check().agents
        for agent, row_id in self._plan.agents.items():
            if agent not in known:
                close = get_close_matches(agent, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
                raise ConfigError(
                    f"data: row {row_id} names the agent {agent!r}, which the Gym of "
                    f"environment.gym.config_paths does not have; {hint}"
                )
        return handle

    def close(self) -> None:
        """End Gym; one that still starts gives up. Idempotent.

        Raises:
            GymError: something of it is left.
        """
        with self._lock:
            self._closed = True
            handle = self._handle
        try:
            if handle is not None:
                handle.shutdown(self._plan.shutdown_timeout_s)
            # What a start that was given up raises is no news.
            with contextlib.suppress(Exception):
                self._started.exception(self._plan.shutdown_timeout_s + _MARGIN_S)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, base_urls: DeferredBaseUrls, work_dir: Path) -> NemoGymHandle:
        return spinup_nemo_gym_actor(
            {"nemo_gym": {"work_dir": str(work_dir), **self._plan.section}},
            base_urls=base_urls,
            model_name=self._plan.model_name,
            # Answers are not kept, so nobody reads their text.
            tokenizer=None,
            enable_router_replay=False,
            use_fastokens=False,
            created=self._created,
        )

    def _created(self, handle: NemoGymHandle) -> None:
        with self._lock:
            if self._closed:
                raise GymUnavailable("the run ended before Gym started", component="gym")
            self._handle = handle
