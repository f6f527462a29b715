"""The replicas of the run's engine, in Ray actors, as one engine."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

from rl_generation.fleet.fleet import Fleet
from rl_generation.fleet.ray_replica import RayReplica
from rl_generation.fleet.ray_settings import RaySettings
from rl_generation.fleet.settings import FleetSettings

from .config import JobConfig
from .engine_plan import EnginePlan
from .memory import huge_page_variables

# Nobody waits longer for replicas of a run that has failed: they may be busy, and are ended.
_AFTER_A_FAILURE_S = 5.0
_REFIT_S = 60.0


@contextlib.contextmanager
def open_fleet(plan: EnginePlan, config: JobConfig) -> Generator[Fleet]:
    """The fleet, not started; what it starts in the block ends with it."""
    fleet = build_fleet(plan, config)
    patience_s = _AFTER_A_FAILURE_S
    try:
        yield fleet
        patience_s = config.cluster.shutdown_timeout_s
    finally:
        fleet.shutdown(patience_s)


def build_fleet(plan: EnginePlan, config: JobConfig) -> Fleet:
    """The fleet, not started."""
    cluster = config.cluster
    # If all have died, requests wait until the first is back: it has to start anew, and to be refitted.
    patience_s = cluster.start_timeout_s + _REFIT_S
    # Processes of one machine share memory; elsewhere the bytes have to travel.
    transport = "shared_memory" if cluster.address is None else "object_store"
    return Fleet(
        replicas_of(plan, config),
        FleetSettings(
            request_timeout_s=cluster.call_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
            replica_wait_s=patience_s,
            transport=transport,
        ),
    )


def replicas_of(plan: EnginePlan, config: JobConfig) -> list[RayReplica]:
    """Those of the plan, not started."""
    cluster = config.cluster
    actor_class = _named(plan.actor)
    ray = RaySettings(
        num_gpus=plan.num_gpus,
        env_vars=huge_page_variables(),
        schedule_timeout_s=cluster.start_timeout_s,
        start_timeout_s=cluster.start_timeout_s,
        generate_timeout_s=cluster.call_timeout_s,
    )
    return [
        RayReplica(settings.name, actor_class, (settings, plan.listen, plan.server), ray)
        for settings in plan.settings
    ]


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
