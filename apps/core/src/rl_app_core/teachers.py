"""Teachers: other policies, in processes of their own, whose opinion of the rollouts is learnt from."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rl_algorithms.protocols import Batch
from rl_generation.failures import GenerationError
from rl_generation.fleet.ray_replica import RayReplica
from rl_generation.fleet.threads import LoopThread
from rl_generation.vllm.prompt_scores import PromptScores
from rl_generation.vllm.settings import VllmSettings
from rl_policy_megatron import OptimizerSettings, ParallelLayout
from rl_policy_megatron.errors import PolicyError
from rl_policy_megatron.group import MegatronPolicyGroup, RankSettings
from rl_policy_megatron.hf_config import read_model_shape

from .config import ConfigError, JobConfig
from .conversation import load_tokenizer
from .engine_fleet import replicas_of
from .engine_plan import EnginePlan, plan_engines
from .policy_plan import policy_settings
from .remote import group_settings

# What is added to the deadlines of a replica before its loop is given up as well.
_SLACK_S = 10.0


@dataclass(frozen=True)
class PolicyTeacher:
    """The :class:`rl_algorithms.protocols.Teacher` that computes as the policy does."""

    policy: MegatronPolicyGroup

    def logprobs(self, batch: Batch, agents: Sequence[str]) -> torch.Tensor:
        """See :meth:`rl_algorithms.protocols.Teacher.logprobs`."""
        return self.policy.logprobs(_Shown.of(batch))

    def topk_logprobs(self, batch: Batch, agents: Sequence[str], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rl_algorithms.protocols.Teacher.topk_logprobs`."""
        return self.policy.topk_logits(_Shown.of(batch), k)


@contextmanager
def policy_teacher(config: JobConfig, model: Path, *, micro_batch_size: int) -> Generator[PolicyTeacher]:
    """A teacher in one Ray actor, for as long as the block lasts; Ray is running.

    It computes in the student's precision and under the student's sampling temperature: both sides of a
    divergence are then of the distributions that tokens are drawn from.

    Args:
        config: of the student's run.
        model: the teacher, a directory in Hugging Face format.
        micro_batch_size: rows that go through it at once.

    Raises:
        RankError: it did not start.
    """
    student = policy_settings(config)
    settings = replace(
        student,
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=None,
        layout=ParallelLayout(),
        lora=None,
        recompute="none",
    )
    ranks = RankSettings(
        model_directory=str(model.resolve()),
        policy=settings,
        optimizer=OptimizerSettings(),
        threads=config.cluster.threads,
        collective_timeout_s=config.cluster.call_timeout_s,
    )
    with MegatronPolicyGroup(ranks, group_settings(config.cluster)) as policy:
        yield PolicyTeacher(policy)


@dataclass(frozen=True)
class EngineTeacher:
    """The :class:`rl_algorithms.protocols.Teacher` that is an engine: it says what it would have sampled.

    Attributes:
        replica: in a Ray actor, started.
        loop: that the replica lives on.
        timeout_s: for its answer, which the replica's own deadline comes before.
    """

    replica: RayReplica
    loop: LoopThread
    timeout_s: float

    def logprobs(self, batch: Batch, agents: Sequence[str]) -> torch.Tensor:
        """See :meth:`rl_algorithms.protocols.Teacher.logprobs`."""
        found = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        for row, scores in enumerate(self._scores(batch, 0)):
            found[row, 1 : 1 + len(scores.logprobs)] = torch.tensor(scores.logprobs)
        return found

    def topk_logprobs(self, batch: Batch, agents: Sequence[str], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`rl_algorithms.protocols.Teacher.topk_logprobs`."""
        logprobs = torch.zeros((*batch.input_ids.shape, k), dtype=torch.float32)
        ids = torch.zeros((*batch.input_ids.shape, k), dtype=torch.int64)
        for row, scores in enumerate(self._scores(batch, k)):
            end = 1 + len(scores.top_ids)
            # What came from Ray cannot be written to, and torch warns of that.
            logprobs[row, 1:end] = torch.from_numpy(scores.top_logprobs.copy())
            ids[row, 1:end] = torch.from_numpy(scores.top_ids.copy())
        return logprobs, ids

    def _scores(self, batch: Batch, top: int) -> list[PromptScores]:
        sequences = [
            row[:length].tolist() for row, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True)
        ]
        return self.loop.call(self.replica.score_all(sequences, top), "scoring answers", self.timeout_s)


@contextmanager
def engine_teacher(config: JobConfig, model: Path, *, top: int) -> Generator[EngineTeacher]:
    """A replica of vLLM in one Ray actor, for as long as the block lasts; Ray is running.

    Args:
        config: of the student's run; ``generation.vllm`` says how the replica computes.
        model: the teacher, a directory in Hugging Face format.
        top: most tokens that will be asked for at one position.

    Raises:
        ConfigError: vLLM is not installed, or the student samples at another temperature than 1, for which
            vLLM has no scores.
        GenerationError: it did not start.
    """
    plan, cluster = teacher_plan(config, model, top=top), config.cluster
    (replica,) = replicas_of(plan, config)
    loop = LoopThread(replica.name)
    try:
        # Making the actor and starting its engine have this long each.
        loop.call(replica.start(), "starting", 2 * cluster.start_timeout_s + _SLACK_S)
        yield EngineTeacher(replica, loop, cluster.call_timeout_s + _SLACK_S)
    finally:
        patience_s = cluster.shutdown_timeout_s
        with suppress(GenerationError):
            loop.call(replica.shutdown(patience_s), "shutting down", patience_s + _SLACK_S)
        loop.close(_SLACK_S)


def teacher_plan(config: JobConfig, model: Path, *, top: int) -> EnginePlan:
    """The replica that :func:`engine_teacher` starts.

    Raises:
        ConfigError: as there.
    """
    if config.generation.temperature != 1.0:
        raise ConfigError(
            f"teacher.engine=vllm scores at temperature 1, and generation.temperature is "
            f"{config.generation.temperature}: set that to 1, or teacher.engine=policy"
        )
    wanted = config.generation.vllm
    generation = config.generation.model_copy(
        update={
            "engine": "vllm",
            "vllm": wanted.model_copy(
                update={
                    "replicas": 1,
                    "engine_arguments": {"max_logprobs": max(top, 1), **wanted.engine_arguments},
                }
            ),
        }
    )
    plan = plan_engines(config.model_copy(update={"generation": generation}), model)
    assert plan is not None
    settings = plan.settings[0]
    assert isinstance(settings, VllmSettings)
    return replace(
        plan, settings=(replace(settings, name="teacher", tokenizer=False),), listen=None, server=None
    )


def check_teacher(key: str, model: Path, student: Path | None) -> None:
    """Refuse a teacher that cannot judge the student's tokens.

    Args:
        key: that named it.
        model: the teacher, a directory in Hugging Face format.
        student: the same of the student; ``None`` where there is none yet.

    Raises:
        ConfigError: it is no model, or its tokens are not the student's.
    """
    if not model.is_dir():
        raise ConfigError(f"{key}={model}: there is no such directory; give one in Hugging Face format")
    try:
        shape = read_model_shape(model)
    except PolicyError as error:
        raise ConfigError(f"{key}: {error}") from error
    if student is None:
        return
    if read_model_shape(student).vocabulary != shape.vocabulary or _tokens(key, model) != _tokens(
        "model.path", student
    ):
        raise ConfigError(
            f"{key}: the teacher {model} and the student {student} have other vocabularies, so their tokens "
            "cannot be compared; give a teacher with the student's tokenizer"
        )


def _tokens(key: str, model: Path) -> dict[str, int]:
    """Every token of a model's tokenizer, with its id."""
    return dict(load_tokenizer(model, key=key).get_vocab())


@dataclass(frozen=True)
class _Shown:
    """What a teacher needs of a batch; the rest is not sent."""

    input_ids: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, batch: Batch) -> _Shown:
        return cls(batch.input_ids, batch.lengths)

    def select(self, rows: Sequence[int]) -> _Shown:
        """See :class:`rl_algorithms.protocols.Batch`."""
        index = torch.as_tensor(list(rows), dtype=torch.int64)
        lengths = self.lengths[index]
        width = int(lengths.max()) if len(index) else 0
        return _Shown(self.input_ids[index, :width].clone(), lengths)
