"""The one place where a run's parts are built, bound together and taken down again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from rl_gym_bridge.actor_handle import NemoGymHandle
from rl_gym_bridge.local_runner import LocalRunner
from rl_gym_bridge.requests import RolloutRunner
from rl_policy_megatron.group import MegatronPolicyGroup

from .chat_model import EngineChatModel
from .cluster import ray_cluster
from .config import JobConfig
from .conversation import ConversationTokenizer, load_conversation
from .demonstrations import tokenizer_texts
from .engine_fleet import open_fleet
from .engine_plan import EnginePlan, plan_engines
from .gym_environment import starting_gym
from .gym_plan import GymPlan
from .gym_rollouts import GymRollouts
from .loggers import Loggers
from .policy_plan import rank_settings
from .preflight import Prepared
from .remote import RemoteWorker, group_settings
from .rollout_engine import ColocatedEngine, FleetEngine, RolloutEngine
from .rollouts import LocalRollouts, Rollouts
from .run_directory import RunDirectory
from .tiny_model import write_tiny_model


@dataclass(frozen=True, slots=True)
class Runtime:
    """The living parts of a run.

    Attributes:
        policy: in Ray actors, one for each of its ranks.
        engine: what rollouts are sampled with; it always has the policy's newest weights.
        base_urls: of the engine's servers.
        rollouts: environment and engine, bound together, for a loop that asks for a step at a time.
        runner: the same for one that asks for single rollouts, and refreshes the engine itself.
        conversation: the tokenizer.
        max_context: the most tokens that prompt and answer may have together.
        loggers: where metrics go.
    """

    policy: MegatronPolicyGroup
    engine: RolloutEngine
    base_urls: tuple[str, ...]
    rollouts: Rollouts
    runner: RolloutRunner
    conversation: ConversationTokenizer
    max_context: int
    loggers: Loggers


@contextlib.contextmanager
def compose(
    prepared: Prepared,
    directory: RunDirectory,
    elapsed: Callable[[], float],
    *,
    resume_step: int | None = None,
    more_actors: int = 0,
) -> Generator[Runtime]:
    """Build everything for the length of the block, in one order, and take it down in the reverse.

    Args:
        prepared: the checked configuration and its rows.
        directory: of the run.
        elapsed: seconds that the run has taken so far.
        resume_step: step of the checkpoint that the run continues from; what it logged after that is
            dropped, once everything that could fail has started.
        more_actors: Ray actors that the caller will start beside these.

    Raises:
        ConfigError: the model's tokenizer cannot be used, or Gym lacks an agent that rows name.
        ClusterError, RankError, GenerationError, GymError: a process did not start.
    """
    config = prepared.config
    model_dir = model_directory(config, directory)
    conversation = load_conversation(model_dir, config.model.chat_template)
    plan = plan_engines(config, model_dir)
    with contextlib.ExitStack() as stack:
        actors = config.policy.parallel.world + (0 if plan is None else len(plan.settings)) + more_actors
        stack.enter_context(ray_cluster(config.cluster, directory.logs, actors=actors))
        if plan is None:
            started = _colocated(config, model_dir)
        else:
            started = _apart(config, model_dir, plan, prepared.gym, directory.logs / "gym")
        parts = stack.enter_context(started)
        max_context = _longest(config, parts.policy.description["max_context"])
        rollouts, runner = _played(prepared, parts, conversation, max_context)
        directory.forget_after(-1 if resume_step is None else resume_step)
        loggers = Loggers.for_run(directory, elapsed, tensorboard=config.logging.tensorboard)
        stack.callback(loggers.close)
        yield Runtime(
            parts.policy, parts.engine, parts.base_urls, rollouts, runner, conversation, max_context, loggers
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs in other processes."""

    policy: MegatronPolicyGroup
    engine: RolloutEngine
    base_urls: tuple[str, ...] = ()
    gym: NemoGymHandle | None = None


@contextlib.contextmanager
def _colocated(config: JobConfig, model_dir: Path) -> Generator[_Parts]:
    """Policy and engine in one process."""
    with RemoteWorker(rank_settings(config, model_dir), group_settings(config.cluster)) as worker:
        yield _Parts(worker, ColocatedEngine(worker))


@contextlib.contextmanager
def _apart(
    config: JobConfig, model_dir: Path, plan: EnginePlan, gym: GymPlan | None, gym_logs: Path
) -> Generator[_Parts]:
    """The policy's ranks, replicas of an engine and perhaps a Gym, each in processes of its own.

    They start at the same time: Gym is told the replicas' addresses, which are bound before anything loads.
    They end one after the other, whoever asks first.
    """
    settings = group_settings(config.cluster, num_gpus=plan.policy_gpus)
    with contextlib.ExitStack() as stack:
        policy = stack.enter_context(
            MegatronPolicyGroup(rank_settings(config, model_dir), settings, wait=False)
        )
        fleet = stack.enter_context(open_fleet(plan, config))
        starting = None
        if gym is not None:
            starting = stack.enter_context(
                starting_gym(
                    gym,
                    fleet.reserve(),
                    ready_timeout_s=config.cluster.start_timeout_s,
                    work_dir=gym_logs,
                )
            )
        fleet.start()
        policy.wait_until_started()
        engine = FleetEngine(fleet, policy)
        stack.callback(engine.close)
        handle = None if starting is None else starting.wait()
        yield _Parts(policy, engine, tuple(fleet.base_urls), handle)


def _played(
    prepared: Prepared, parts: _Parts, conversation: ConversationTokenizer, max_context: int
) -> tuple[Rollouts, RolloutRunner]:
    """What plays the rows: Gym, or the environments of this process."""
    config, generation = prepared.config, prepared.config.generation
    if prepared.gym is not None and parts.gym is not None:
        gym = parts.gym
        rollouts = GymRollouts(gym, parts.engine, prepared.gym, seed=config.seed, check=gym.health_check)
        return rollouts, gym
    model = EngineChatModel(parts.engine, conversation, generation, max_context)
    most = generation.max_new_tokens
    runner = LocalRunner(
        prepared.environments,
        model,
        max_new_tokens=most,
        temperature=generation.temperature,
        top_p=generation.top_p,
    )
    return LocalRollouts(model, prepared.environments, seed=config.seed, max_new_tokens=most), runner


def _longest(config: JobConfig, policy_context: int) -> int:
    """The most tokens that prompt and answer may have together, for the policy and for the engine."""
    generation = config.generation
    if generation.engine == "megatron":
        return policy_context
    own = getattr(generation, generation.engine).max_model_len
    return policy_context if own is None else min(own, policy_context)


def model_directory(config: JobConfig, directory: RunDirectory) -> Path:
    """Where the initial model is; one made on the spot is written there first if it is missing."""
    if config.model.tiny is None:
        assert config.model.path is not None
        return config.model.path
    if not (directory.model / "model.safetensors").is_file():
        write_tiny_model(directory.model, config.model.tiny, tokenizer_texts(), config.seed)
    return directory.model
