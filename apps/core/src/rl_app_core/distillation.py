"""On-policy distillation: from the configuration to the method and the loop that it describes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rl_algorithms.advantages import Constant, OnPolicyDistillation
from rl_algorithms.distillation import TaskTeachers
from rl_algorithms.losses import ClippedPGLoss, DistillationLoss, LossError
from rl_algorithms.method import Method
from rl_algorithms.protocols import PolicyLoss, Teacher

from .compose import Runtime
from .config import ConfigError, DistillationConfig
from .job import Trainer
from .loop_plan import shared_loop_settings
from .teachers import engine_teacher, policy_teacher, teacher_plan


def check_settings(config: DistillationConfig) -> None:
    """Refuse combinations that the loss or the loop refuses.

    Raises:
        ConfigError: naming what does not go together.
    """
    try:
        distillation_loss(config)
        tiny, wanted = config.model.tiny, _top(config)
        if tiny is not None and wanted > tiny.vocab_size:
            raise ValueError(f"top_k={wanted} exceeds model.tiny.vocab_size={tiny.vocab_size}; lower it")
        shared_loop_settings(config)
    except (LossError, ValueError) as error:
        raise ConfigError(f"algorithm: {error}") from error
    if config.teacher.engine == "vllm":
        teacher_plan(config, Path("model"), top=_top(config))


def distillation_trainer(config: DistillationConfig, teachers: Mapping[str, Path]) -> Trainer:
    """What the shared job trains by.

    Args:
        config: of the run.
        teachers: directories in Hugging Face format, by the name of an environment; that of ``""`` is asked
            about all other rows.

    Raises:
        ConfigError: see :func:`check_settings`.
    """
    check_settings(config)

    @contextmanager
    def method(runtime: Runtime) -> Generator[Method]:
        advantage = OnPolicyDistillation() if config.algorithm.objective == "opd" else Constant()
        with ExitStack() as stack:
            opened: dict[str, Teacher] = {
                agent: stack.enter_context(_open(config, model)) for agent, model in teachers.items()
            }
            otherwise = opened.pop("", None)
            teacher = TaskTeachers(opened, otherwise) if opened or otherwise is None else otherwise
            yield Method(advantage, distillation_loss(config), teacher=teacher)

    return Trainer("distill", shared_loop_settings(config), method, actors=len(teachers))


def _open(config: DistillationConfig, model: Path) -> AbstractContextManager[Teacher]:
    if config.teacher.engine == "vllm":
        return engine_teacher(config, model, top=_top(config))
    return policy_teacher(config, model, micro_batch_size=config.teacher.micro_batch_size)


def _top(config: DistillationConfig) -> int:
    return config.algorithm.top_k if config.algorithm.objective == "topk" else 0


def distillation_loss(config: DistillationConfig) -> PolicyLoss:
    """The loss that the configuration describes."""
    algorithm = config.algorithm
    if algorithm.objective == "opd":
        return ClippedPGLoss(
            clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, normalization=algorithm.normalization
        )
    return DistillationLoss(
        k=algorithm.top_k,
        divergence=algorithm.divergence,
        forward_weight=algorithm.forward_weight,
        outside=algorithm.outside,
        normalization=algorithm.normalization,
    )
