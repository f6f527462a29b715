"""The one place where a run's parts are built, bound together and taken down again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from rl_policy_megatron import OptimizerSettings, PolicySettings

from .chat_model import EngineChatModel
from .cluster import ray_cluster
from .config import RunConfig
from .conversation import ConversationTokenizer, load_conversation
from .demonstrations import tokenizer_texts
from .engine_fleet import running_fleet
from .engine_plan import EnginePlan, plan_engines
from .loggers import Loggers
from .preflight import Prepared
from .remote import RemotePolicy, RemoteWorker
from .rollout_engine import ColocatedEngine, FleetEngine, RolloutEngine
from .rollouts import LocalRollouts
from .run_directory import RunDirectory
from .tiny_model import write_tiny_model
from .workers import WorkerSettings


@dataclass(frozen=True, slots=True)
class Runtime:
    """The living parts of a run.

    Attributes:
        policy: in a Ray actor.
        engine: what rollouts are sampled with; it always has the policy's newest weights.
        base_urls: of the engine's servers.
        rollouts: environment and engine, bound together.
        conversation: the tokenizer.
        loggers: where metrics go.
    """

    policy: RemotePolicy
    engine: RolloutEngine
    base_urls: tuple[str, ...]
    rollouts: LocalRollouts
    conversation: ConversationTokenizer
    loggers: Loggers


@contextlib.contextmanager
def compose(
    prepared: Prepared,
    directory: RunDirectory,
    elapsed: Callable[[], float],
    *,
    resume_step: int | None = None,
) -> Generator[Runtime]:
    """Build everything for the length of the block, in one order, and take it down in the reverse.

    Args:
        prepared: the checked configuration and its rows.
        directory: of the run.
        elapsed: seconds that the run has taken so far.
        resume_step: step of the checkpoint that the run continues from; what it logged after that is
            dropped, once everything that could fail has started.

    Raises:
        ConfigError: the model's tokenizer cannot be used.
        ClusterError, WorkerError, GenerationError: a process did not start.
    """
    config = prepared.config
    model_dir = model_directory(config, directory)
    conversation = load_conversation(model_dir, config.model.chat_template)
    plan = plan_engines(config, model_dir)
    with contextlib.ExitStack() as stack:
        actors = 1 + (0 if plan is None else len(plan.settings))
        stack.enter_context(ray_cluster(config.cluster, directory.logs, actors=actors))
        parts = _colocated(config, model_dir) if plan is None else _apart(config, model_dir, plan)
        policy, engine, base_urls = stack.enter_context(parts)
        model = EngineChatModel(
            engine, conversation, config.generation, _longest(config, policy.description["max_context"])
        )
        rollouts = LocalRollouts(
            model,
            prepared.environments,
            seed=config.seed,
            max_new_tokens=config.generation.max_new_tokens,
        )
        directory.forget_after(-1 if resume_step is None else resume_step)
        loggers = Loggers.for_run(directory, elapsed, tensorboard=config.logging.tensorboard)
        stack.callback(loggers.close)
        yield Runtime(policy, engine, base_urls, rollouts, conversation, loggers)


_Parts = tuple[RemotePolicy, RolloutEngine, tuple[str, ...]]


@contextlib.contextmanager
def _colocated(config: RunConfig, model_dir: Path) -> Generator[_Parts]:
    """Policy and engine in one process."""
    with RemoteWorker(worker_settings(config, model_dir), config.cluster) as worker:
        yield worker, ColocatedEngine(worker), ()


@contextlib.contextmanager
def _apart(config: RunConfig, model_dir: Path, plan: EnginePlan) -> Generator[_Parts]:
    """The policy in one process, and replicas of an engine in others; they start at the same time."""
    settings = worker_settings(config, model_dir)
    with (
        RemotePolicy(settings, config.cluster, num_gpus=plan.policy_gpus, wait=False) as policy,
        running_fleet(plan, config) as fleet,
    ):
        policy.wait_until_started()
        engine = FleetEngine(fleet, policy)
        try:
            yield policy, engine, tuple(fleet.base_urls)
        finally:
            engine.close()


def _longest(config: RunConfig, policy_context: int) -> int:
    """The most tokens that prompt and answer may have together, for the policy and for the engine."""
    generation = config.generation
    if generation.engine == "megatron":
        return policy_context
    own = getattr(generation, generation.engine).max_model_len
    return policy_context if own is None else min(own, policy_context)


def model_directory(config: RunConfig, directory: RunDirectory) -> Path:
    """Where the initial model is; one made on the spot is written there first if it is missing."""
    if config.model.tiny is None:
        assert config.model.path is not None
        return config.model.path
    if not (directory.model / "model.safetensors").is_file():
        write_tiny_model(directory.model, config.model.tiny, tokenizer_texts(), config.seed)
    return directory.model


def worker_settings(config: RunConfig, model_dir: Path) -> WorkerSettings:
    """What the worker is built from."""
    return WorkerSettings(
        model_dir=str(model_dir.resolve()),
        policy=PolicySettings(
            dtype=config.policy.precision,
            micro_batch_size=config.policy.micro_batch_size,
            temperature=config.generation.temperature,
            seed=config.seed,
        ),
        optimizer=warm_start_optimizer(config) if config.warm_start.steps else algorithm_optimizer(config),
        threads=config.cluster.threads,
    )


def warm_start_optimizer(config: RunConfig) -> OptimizerSettings:
    """AdamW of the supervised phase."""
    warm = config.warm_start
    return OptimizerSettings(
        betas=warm.adam_betas, weight_decay=warm.weight_decay, grad_clip=warm.gradient_clip
    )


def algorithm_optimizer(config: RunConfig) -> OptimizerSettings:
    """AdamW of reinforcement learning."""
    algorithm = config.algorithm
    return OptimizerSettings(
        betas=algorithm.adam_betas, weight_decay=algorithm.weight_decay, grad_clip=algorithm.gradient_clip
    )
