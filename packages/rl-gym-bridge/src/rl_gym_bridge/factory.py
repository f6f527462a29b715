"""The one way in which a trainer gets Gym as a Ray actor, and the one in which it lets environments go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .actor_handle import COMPONENT, NemoGymHandle, end_actor
from .config import DeferredBaseUrls, NemoGymConfig, build_nemo_gym_config
from .endings import GRACE_S, LAYER_S, end_all

logger = logging.getLogger(__name__)

#: Full name of the actor's class, by which the table of environments knows it.
NEMO_GYM_ACTOR = "rl_gym_bridge.actor.NemoGym"
#: Seconds that a Gym which failed to start may take to end by itself.
NEMO_GYM_GRACEFUL_SHUTDOWN_TIMEOUT_S = 120
#: Seconds beyond Gym's own start in which Ray has to bring the actor's process up.
ACTOR_START_ALLOWANCE_S = 120.0


def spinup_nemo_gym_actor(
    env_config: Mapping[str, Any],
    *,
    base_urls: Sequence[str] | DeferredBaseUrls,
    model_name: str,
    tokenizer: Any | None,
    enable_router_replay: bool,
    use_fastokens: bool,
    token_capture: Mapping[str, Any] | None = None,
    head_url: str | None = None,
    env_vars: Mapping[str, str] | None = None,
    created: Callable[[NemoGymHandle], object] | None = None,
) -> NemoGymHandle:
    """Start Gym in a Ray actor, in the environment of its class, and then give it the tokenizer.

    The actor is never restarted and no call repeated: a Gym that died takes its rollouts with it, and who
    started it decides. With ``num_gpu_nodes`` it is put on the caller's node if that has room, else wherever
    Ray likes.

    If anything fails, the actor is asked to shut down, waited for at most
    ``NEMO_GYM_GRACEFUL_SHUTDOWN_TIMEOUT_S`` seconds, and killed; then the first exception is raised, the very
    object, whatever happened meanwhile.

    Args:
        env_config: the environment section of a run; see :func:`~rl_gym_bridge.config.build_nemo_gym_config`.
        base_urls: model servers of the policy. With :class:`~rl_gym_bridge.config.DeferredBaseUrls` Gym
            starts while they still load, and the first rollout waits for them.
        model_name: name under which they serve the policy.
        tokenizer: has ``decode(list[int])``; ``None`` keeps answers without text.
        enable_router_replay: whether answers must carry the router's choices.
        use_fastokens: whether the policy uses the fast tokenizer. The actor keeps it and tells it
            (``NemoGym.settings``); Gym has no such setting.
        token_capture: settings of token capture, likewise.
        head_url: head server of a Gym that somebody else runs, instead of starting one.
        env_vars: further variables of the actor's process.
        created: told the handle before Gym starts in it, so that another thread can shut it down meanwhile;
            what it raises ends the actor as any failure does.

    Raises:
        GymConfigError: settings that cannot be used; nothing was started.
        ActorEnvironmentError: the actor has no environment here; nothing was started.
        GymError: Gym did not start.
    """
    from rl_actor_envs.runtime import make_actor_runtime_env

    config = build_nemo_gym_config(
        env_config,
        base_urls=base_urls,
        model_name=model_name,
        enable_router_replay=enable_router_replay,
        use_fastokens=use_fastokens,
        token_capture=token_capture,
    )
    options = _actor_options(config, dict(make_actor_runtime_env(NEMO_GYM_ACTOR, env_vars=env_vars)))
    actor = _create(config, head_url, options)
    handle = NemoGymHandle(
        actor, stall_timeout_s=_stall_timeout_s(config), shutdown_timeout_s=config.shutdown_timeout_s
    )
    try:
        if created is not None:
            created(handle)
        facts = handle.call("start", timeout_s=config.start_timeout_s + ACTOR_START_ALLOWANCE_S)
        if tokenizer is not None:
            handle.set_tokenizer(tokenizer)
    except BaseException:
        for problem in end_actor(actor, NEMO_GYM_GRACEFUL_SHUTDOWN_TIMEOUT_S):
            logger.warning("%s, which did not start, did not end properly either: %r", COMPONENT, problem)
        raise
    logger.info("%s runs: %s", COMPONENT, facts)
    return handle


def _actor_options(config: NemoGymConfig, runtime_env: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        # It waits for others all the time; what Gym's servers use, Ray does not count.
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": runtime_env,
    }
    if config.num_gpu_nodes:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            node_id=ray.get_runtime_context().get_node_id(), soft=True
        )
    return options


def _create(config: NemoGymConfig, head_url: str | None, options: dict[str, Any]) -> Any:
    import ray

    from .actor import NemoGym

    return ray.remote(NemoGym).options(**options).remote(config, head_url=head_url)


def _stall_timeout_s(config: NemoGymConfig) -> float:
    """How long no rollout at all may finish while all are well."""
    loading = config.base_urls.ready_timeout_s if isinstance(config.base_urls, DeferredBaseUrls) else 0.0
    return loading + config.retry.elapsed_s + config.rollout_timeout_s + ACTOR_START_ALLOWANCE_S


def shutdown_environments(
    environments: Iterable[Any] | Mapping[str, Any],
    timeout_s: float = float(NEMO_GYM_GRACEFUL_SHUTDOWN_TIMEOUT_S),
) -> None:
    """End environments, all at the same time; idempotent.

    Together they may take ``timeout_s`` seconds, and then ``GRACE_S`` and a little more of
    :mod:`~rl_gym_bridge.endings`, in which a session kills what is left.

    Args:
        environments: handles, sessions, or raw handles of the actor; ``None`` and repetitions are skipped.
        timeout_s: the bound that each of them gets.

    Raises:
        Exception: the first one's, in the order of ``environments``, after all were tried; the others' are
            logged. One that does not end in time is a :class:`~rl_gym_bridge.failures.GymTimeout`.
    """
    listed = environments.values() if isinstance(environments, Mapping) else environments
    distinct = list({id(entry): entry for entry in listed if entry is not None}.values())
    steps = {
        f"{type(entry).__name__} {number}": partial(_shutdown_of(entry), timeout_s)
        for number, entry in enumerate(distinct)
    }
    # A session keeps to GRACE_S beyond its bound, and a handle waits a little longer for one in an actor.
    first, *others = end_all(steps, timeout_s + GRACE_S + 2 * LAYER_S) or [None]
    for problem in others:
        logger.error("an environment did not end: %r", problem)
    if first is not None:
        raise first


def _shutdown_of(environment: Any) -> Any:
    shutdown = environment.shutdown
    return NemoGymHandle(environment).shutdown if hasattr(shutdown, "remote") else shutdown
