"""Starts Gym, again with other ports where another program was faster."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

from ..config import NemoGymConfig
from ..failures import GymStartError
from ..interpreter import GymInterpreter
from .deployment import Deployment, PortTaken
from .ports import choose_ports, is_free
from .settings import gym_settings

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 4


def start_deployment(
    config: NemoGymConfig,
    interpreter: GymInterpreter,
    *,
    parent_folder: Callable[[], Path],
    search_folder: Path,
    deadline: float,
    stopping: Callable[[], bool],
    publish: Callable[[Deployment], None],
) -> None:
    """Run Gym until all its servers are ready.

    Args:
        config: the bridge's settings.
        interpreter: what runs Gym.
        parent_folder: makes the folder for working folders.
        search_folder: the user's own folder.
        deadline: when to give up, by ``time.monotonic``.
        stopping: whether to give up now.
        publish: takes each attempt before anything of it exists, so that the caller can always end it, also
            again where processes of a failed attempt are still there.

    Raises:
        GymConfigError: settings cannot be used.
        GymStartError: Gym did not become ready.
    """
    rng = random.Random()
    for attempt in range(1, _ATTEMPTS + 1):
        ports = choose_ports(config.gym_config, rng)
        if ports.head_is_fixed and not is_free(ports.head):
            raise GymStartError(
                f"port {ports.head} is in use",
                component="gym_config.head_server.port",
                remedy="leave the port out, or end what uses it",
            )
        settings = gym_settings(config, interpreter, ports, search_folder)
        deployment = Deployment(
            interpreter,
            settings,
            ports,
            parent_folder=parent_folder(),
            search_folder=search_folder,
            shutdown_timeout_s=config.shutdown_timeout_s,
        )
        publish(deployment)
        try:
            _go_on(stopping)
            deployment.prepare()
            _go_on(stopping)
            deployment.launch()
            deployment.await_head(deadline, stopping)
            deployment.await_servers(deadline, stopping)
            return
        except PortTaken as error:
            if attempt == _ATTEMPTS or time.monotonic() >= deadline:
                raise GymStartError(
                    f"another program took a port in each of {attempt} attempts: {error}; its log says:\n"
                    f"{deployment.excerpt()}\n",
                    component="gym",
                    address=deployment.head_url,
                    attempts=attempt,
                    remedy="choose another port_range_low and port_range_high, or leave them out",
                ) from error
            _LOG.warning("%s; Gym is started again with other ports", error)
            deployment.end(1.0)


def _go_on(stopping: Callable[[], bool]) -> None:
    if stopping():
        raise GymStartError("it was shut down while it started", component="gym")
