"""The one place where a run's parts are built, bound together and taken down again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from rl_policy_megatron.group import MegatronPolicyGroup

from .chat_model import EngineChatModel
from .cluster import ray_cluster
from .config import JobConfig
from .conversation import ConversationTokenizer, load_conversation
from .demonstrations import tokenizer_texts
from .engine_fleet import running_fleet
from .engine_plan import EnginePlan, plan_engines
from .loggers import Loggers
from .policy_plan import rank_settings
from .preflight import Prepared
from .remote import RemoteWorker, group_settings
from .rollout_engine import ColocatedEngine, FleetEngine, RolloutEngine
from .rollouts import LocalRollouts
from .run_directory import RunDirectory
from .tiny_model import write_tiny_model


@dataclass(frozen=True, slots=True)
class Runtime:
    """The living parts of a run.

    Attributes:
        policy: in Ray actors, one for each of its ranks.
        engine: what rollouts are sampled with; it always has the policy's newest weights.
        base_urls: of the engine's servers.
        rollouts: environment and engine, bound together.
        conversation: the tokenizer.
        max_context: the most tokens that prompt and answer may have together.
        loggers: where metrics go.
    """

    policy: MegatronPolicyGroup
    engine: RolloutEngine
    base_urls: tuple[str, ...]
    rollouts: LocalRollouts
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
        ConfigError: the model's tokenizer cannot be used.
        ClusterError, RankError, GenerationError: a process did not start.
    """
    config = prepared.config
    model_dir = model_directory(config, directory)
    conversation = load_conversation(model_dir, config.model.chat_template)
    plan = plan_engines(config, model_dir)
    with contextlib.ExitStack() as stack:
        actors = config.policy.parallel.world + (0 if plan is None else len(plan.settings)) + more_actors
        stack.enter_context(ray_cluster(config.cluster, directory.logs, actors=actors))
        parts = _colocated(config, model_dir) if plan is None else _apart(config, model_dir, plan)
        policy, engine, base_urls = stack.enter_context(parts)
        max_context = _longest(config, policy.description["max_context"])
        model = EngineChatModel(engine, conversation, config.generation, max_context)
        rollouts = LocalRollouts(
            model,
            prepared.environments,
            seed=config.seed,
            max_new_tokens=config.generation.max_new_tokens,
        )
        directory.forget_after(-1 if resume_step is None else resume_step)
        loggers = Loggers.for_run(directory, elapsed, tensorboard=config.logging.tensorboard)
        stack.callback(loggers.close)
        yield Runtime(policy, engine, base_urls, rollouts, conversation, max_context, loggers)


_Parts = tuple[MegatronPolicyGroup, RolloutEngine, tuple[str, ...]]


@contextlib.contextmanager
def _colocated(config: JobConfig, model_dir: Path) -> Generator[_Parts]:
    """Policy and engine in one process."""
    with RemoteWorker(rank_settings(config, model_dir), group_settings(config.cluster)) as worker:
        yield worker, ColocatedEngine(worker), ()


@contextlib.contextmanager
def _apart(config: JobConfig, model_dir: Path, plan: EnginePlan) -> Generator[_Parts]:
    """The policy's ranks, and replicas of an engine in other processes; they start at the same time."""
    settings = group_settings(config.cluster, num_gpus=plan.policy_gpus)
    with (
        MegatronPolicyGroup(rank_settings(config, model_dir), settings, wait=False) as policy,
        running_fleet(plan, config) as fleet,
    ):
        policy.wait_until_started()
        engine = FleetEngine(fleet, policy)
        try:
            yield policy, engine, tuple(fleet.base_urls)
        finally:
            engine.close()


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
