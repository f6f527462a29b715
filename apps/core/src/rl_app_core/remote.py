"""The driver's side of the policy: its ranks as Ray actors, by the run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rl_generation.protocol import Completion, GenerationRequest
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, PolicyRank

from .config.sections import Cluster
from .memory import huge_page_variables
from .workers import ColocatedWorker


def group_settings(cluster: Cluster, *, num_gpus: float = 0.0) -> GroupSettings:
    """Deadlines and resources of the policy's ranks.

    Args:
        cluster: the configuration's.
        num_gpus: that each rank asks Ray for, where others do as well.
    """
    return GroupSettings(
        num_gpus=num_gpus,
        env_vars=huge_page_variables(),
        start_timeout_s=cluster.start_timeout_s,
        call_timeout_s=cluster.call_timeout_s,
        shutdown_timeout_s=cluster.shutdown_timeout_s,
    )


class RemoteWorker(MegatronPolicyGroup):
    """The policy in one process, with the engine that shares its weights."""

    rank_class: ClassVar[type[PolicyRank]] = ColocatedWorker

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See :class:`rl_generation.protocol.Generation`."""
        return self._call("generate", list(requests))
