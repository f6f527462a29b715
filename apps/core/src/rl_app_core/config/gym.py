"""A NeMo Gym as a run's environment: what it is made of, and how long it may take."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from .section import Count, File, Positive, Section

# Settings of Gym or of the bridge that this section has under a name of its own.
_NAMED_OTHERWISE = {"search_folder": "environment.gym.folder"}
# What only the run knows.
_OF_THE_RUN = frozenset({"policy_base_url", "policy_model_name"})


class Gym(Section):
    """A NeMo Gym whose agents play the rows, in its own processes; absent, rows are played in process. It
    asks the engine over HTTP, so ``generation.engine`` is ``vllm`` or ``trtllm`` then, and serves."""

    config_paths: tuple[str, ...] = Field(min_length=1)
    """Gym's configuration files, of the installed Gym or below ``folder``: a model server for
    training, called ``policy_model``, and each environment with its agent."""
    agent: str | None = None
    """The agent that plays rows which name none in ``agent_ref``; generated problems name none."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings, which win over those files: of the bridge (``retry``, ``on_discontinuity``, …, see
    docs/gym.md) and, under every other key, of Gym itself. They are written to the run's config.yaml: let
    Gym read a secret by ``${oc.env:NAME}``."""
    folder: File | None = None
    """Where servers and configuration files of your own are; none is where the command is started."""
    python: File | None = None
    """Interpreter or environment that has Gym; none is the one that ``RL_GYM_PYTHON`` names."""
    work_dir: File | None = None
    """Gym's logs and output; none is ``logs/gym`` in the run directory."""
    num_gpu_nodes: Count = 0
    """Nodes with GPUs that Gym itself uses; Gym gets it too."""
    max_concurrency: PositiveInt = 1024
    """Rollouts at the same time; more wait."""
    start_timeout_s: Positive = 900.0
    """Until every server of Gym answers; the engine and the policy load at the same time."""
    rollout_timeout_s: Positive = 3600.0
    """For one attempt of a rollout."""
    step_timeout_s: Positive = 7200.0
    """For all rollouts of a step, or of a measurement, together."""
    shutdown_timeout_s: Positive = 30.0
    """For Gym to end by itself; then it is killed."""

    @field_validator("settings")
    @classmethod
    def _no_key_twice(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if key in _OF_THE_RUN:
                raise ValueError(f"{key!r} is the run's to say; leave it out")
            named = f"environment.gym.{key}" if key in cls.model_fields else _NAMED_OTHERWISE.get(key)
            if named is not None:
                raise ValueError(f"{key!r} has a key of its own; set {named} instead")
        return value

    @model_validator(mode="after")
    def _a_step_outlasts_a_rollout(self) -> Gym:
        if self.step_timeout_s < self.rollout_timeout_s:
            raise ValueError(
                f"step_timeout_s={self.step_timeout_s:g} is less than rollout_timeout_s="
                f"{self.rollout_timeout_s:g}, which one rollout may take; raise the first or lower the second"
            )
        return self
