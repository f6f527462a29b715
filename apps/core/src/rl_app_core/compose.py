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
from .loggers import Loggers
from .preflight import Prepared
from .remote import RemoteWorker
from .rollouts import LocalRollouts
from .run_directory import RunDirectory
from .tiny_model import write_tiny_model
from .workers import WorkerSettings


@dataclass(frozen=True, slots=True)
class Runtime:
    """The living parts of a run.

    Attributes:
        worker: policy and engine, in a Ray actor.
        rollouts: environment and engine, bound together.
        conversation: the tokenizer.
        loggers: where metrics go.
    """

    worker: RemoteWorker
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
        ClusterError, WorkerError: a process did not start.
    """
    config = prepared.config
    model_dir = model_directory(config, directory)
    conversation = load_conversation(model_dir, config.model.chat_template)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster, directory.logs))
        worker = stack.enter_context(RemoteWorker(worker_settings(config, model_dir), config.cluster))
        model = EngineChatModel(
            worker, conversation, config.generation, int(worker.description["max_context"])
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
        yield Runtime(worker, rollouts, conversation, loggers)


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
