"""Teachers: other policies, in processes of their own, whose opinion of the rollouts is learnt from."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl_algorithms.protocols import Batch
from rl_policy_megatron import OptimizerSettings, ParallelLayout
from rl_policy_megatron.errors import PolicyError
from rl_policy_megatron.group import MegatronPolicyGroup, RankSettings
from rl_policy_megatron.hf_config import read_model_shape

from .config import ConfigError, JobConfig
from .policy_plan import policy_settings
from .remote import group_settings


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
    if read_model_shape(student).vocabulary != shape.vocabulary or _tokens(model) != _tokens(student):
        raise ConfigError(
            f"{key}: the teacher {model} and the student {student} have other vocabularies, so their tokens "
            "cannot be compared; give a teacher with the student's tokenizer"
        )


def _tokens(model: Path) -> dict[str, int]:
    """Every token of a model's tokenizer, with its id."""
    file = model / "tokenizer.json"
    if not file.is_file():
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        return dict(tokenizer.get_vocab())
    content = json.loads(file.read_text(encoding="utf-8"))
    tokens = dict(content["model"]["vocab"]) if isinstance(content["model"]["vocab"], dict) else {}
    return tokens | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


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
