"""The whole configuration of a run."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from .algorithm import Algorithm
from .generation import Generation
from .policy import Policy
from .section import Section
from .sections import (
    Checkpointing,
    Cluster,
    Data,
    Environment,
    Evaluation,
    Logging,
    Model,
    Rewards,
    WarmStart,
)
from .training import Training


class JobConfig(Section):
    """What every application's run is configured by; each adds its own sections."""

    command: ClassVar[str] = ""
    """Name of the console script that reads it."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything that is drawn: initial weights, demonstrations, row order, sampled tokens."""
    model: Model
    data: Data
    environment: Environment = Environment()
    warm_start: WarmStart = WarmStart()
    algorithm: Training = Training()
    generation: Generation = Generation()
    policy: Policy = Policy()
    evaluation: Evaluation = Evaluation()
    checkpointing: Checkpointing = Checkpointing()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()

    @property
    def serves(self) -> bool:
        """Whether the engine's replicas serve HTTP: if they are told to, and always for a Gym."""
        return self.generation.server.enabled or self.environment.gym is not None

    @model_validator(mode="after")
    def _gym_has_somebody_to_ask(self) -> JobConfig:
        if self.environment.gym is not None and self.generation.engine == "megatron":
            raise ValueError(
                "environment.gym: its agents ask an engine over HTTP, and generation.engine=megatron serves "
                "none; use generation.engine=vllm, or leave environment.gym out for in-process environments"
            )
        return self

    @model_validator(mode="after")
    def _the_best_is_measured(self) -> JobConfig:
        kept, every = self.checkpointing.keep_best, self.evaluation.every
        if kept and self.checkpointing.every % every:
            raise ValueError(
                f"checkpointing.keep_best={kept} goes by the held-out accuracy, which is measured every "
                f"{every} steps, and checkpoints are written every {self.checkpointing.every}: make "
                "checkpointing.every a multiple of evaluation.every"
            )
        return self

    @model_validator(mode="after")
    def _one_process_with_the_engine_in_it(self) -> JobConfig:
        world = self.policy.parallel.world
        if self.generation.engine == "megatron" and world > 1:
            raise ValueError(
                f"policy.parallel asks for {world} processes, and generation.engine=megatron works in the "
                "policy's only one; use generation.engine=vllm, or leave policy.parallel out"
            )
        return self


class GRPOConfig(JobConfig):
    """One run of GRPO or a relative of it."""

    command: ClassVar[str] = "grpo"

    algorithm: Algorithm = Algorithm()
    rewards: Rewards = Rewards()

    @model_validator(mode="after")
    def _engine_computes_like_the_policy(self) -> GRPOConfig:
        generation = self.generation
        if generation.engine == "megatron":
            return self
        wanted = getattr(generation, generation.engine).dtype
        if wanted not in (None, self.policy.precision) and self.algorithm.importance_correction is None:
            raise ValueError(
                f"generation.{generation.engine}.dtype={wanted} and policy.precision={self.policy.precision} "
                "give other probabilities to the same tokens; leave the first out, or correct for it with "
                "algorithm.importance_correction"
            )
        return self
