"""One step's rollouts turned into judged samples: who counts, what it earned, what it is worth."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory

from ..advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from ..filters import not_truncated, zero_spread_groups
from .rows import seeded_permutation
from .settings import GRPOSettings
from .state import LoopError

logger = logging.getLogger(__name__)

_SHUFFLE_KEY = 1


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one step, in the order of their rollouts. Tensors are ``[N]``, floats float64.

    Attributes:
        trajectories: N finished rollouts.
        failures: rollouts that are no sample.
        rewards: unshaped; as the environment gave them, or permuted among the valid samples by
            ``shuffle_rewards``. NaN where the environment gave none.
        shaped: what advantages are made of; permuted alike.
        valid: in the baseline of its group.
        trained: enters the loss.
        advantages: 0 where not valid.
        zero_spread: groups whose unshaped rewards are all equal.
    """

    trajectories: list[Trajectory]
    failures: list[RolloutFailure]
    rewards: torch.Tensor
    shaped: torch.Tensor
    valid: torch.Tensor
    trained: torch.Tensor
    advantages: torch.Tensor
    zero_spread: frozenset[str]

    @property
    def tokens(self) -> int:
        return sum(trajectory.sampled_tokens for trajectory in self.trajectories)

    @property
    def rollouts(self) -> int:
        """How many there were, finished or failed."""
        return len(self.trajectories) + len(self.failures)

    def failures_by_kind(self) -> dict[str, int]:
        """Failed rollouts by kind; an environment that failed in mid-rollout counts as data."""
        counts = Counter({kind.value: 0 for kind in FailureKind})
        counts.update(failure.kind.value for failure in self.failures)
        counts[FailureKind.DATA.value] += sum(_environment_failed(t) for t in self.trajectories)
        return dict(counts)

    def first_data_failure(self) -> str:
        """Which rollout of kind data failed first, of which agent, and why; empty if none did."""
        for failure in self.failures:
            if failure.kind is FailureKind.DATA:
                return f"{failure.rollout_id} (agent {failure.agent or 'unnamed'}): {failure.error}"
        for trajectory in filter(_environment_failed, self.trajectories):
            return (
                f"{trajectory.rollout_id} (agent {trajectory.agent or 'unnamed'}): the environment failed in "
                "mid-rollout"
            )
        return ""

    def metrics(self, settings: GRPOSettings) -> dict[str, float]:
        """Rewards and accuracy over valid samples, lengths and truncation over all trajectories."""
        valid = max(int(self.valid.sum()), 1)
        count = max(len(self.trajectories), 1)
        rewards, shaped = self.rewards[self.valid], self.shaped[self.valid]
        truncated = sum(trajectory.stop_reason.truncated for trajectory in self.trajectories)
        failures = {f"failures_{kind}": float(n) for kind, n in self.failures_by_kind().items()}
        return {
            "reward_mean": float(rewards.sum()) / valid,
            "reward_shaped_mean": float(shaped.sum()) / valid,
            "accuracy": float((rewards >= settings.success_reward).sum()) / valid,
            "truncated_share": truncated / count,
            "length_mean": self.tokens / count,
            "tokens": float(self.tokens),
            "groups": float(len({trajectory.group_id for trajectory in self.trajectories})),
            "zero_spread_groups": float(len(self.zero_spread)),
            "samples_valid": float(self.valid.sum()),
            "samples_trained": float(self.trained.sum()),
            "samples_without_reward": float(sum(t.reward is None for t in self.trajectories)),
            "samples_without_tokens": float(sum(t.sampled_tokens == 0 for t in self.trajectories)),
            **failures,
        }


def judge(rollouts: Sequence[Trajectory | RolloutFailure], settings: GRPOSettings, step: int) -> StepSamples:
    """Rewards, shaping, filters and advantages of one step. A failed rollout never becomes a reward.

    A rollout that its environment gave no reward is excluded with a warning: neither 0 nor NaN.
    """
    trajectories = [rollout for rollout in rollouts if isinstance(rollout, Trajectory)]
    failures = [rollout for rollout in rollouts if isinstance(rollout, RolloutFailure)]
    groups = [trajectory.group_id for trajectory in trajectories]
    lengths = torch.tensor([trajectory.sampled_tokens for trajectory in trajectories], dtype=torch.int64)
    keeps_end = not_truncated([trajectory.stop_reason for trajectory in trajectories])
    rewards = torch.tensor(
        [float("nan") if t.reward is None else t.reward for t in trajectories], dtype=torch.float64
    )
    failed = torch.tensor([_environment_failed(t) for t in trajectories], dtype=torch.bool)
    _warn_of_missing_rewards(trajectories, step)
    valid = ~torch.isnan(rewards) & (lengths > 0) & ~failed
    shaped = settings.shaping(rewards, lengths, ~keeps_end)
    if settings.shuffle_rewards:
        rewards, shaped = _shuffled(valid, rewards, shaped, seed=settings.seed, step=step)

    flat = zero_spread_groups(rewards, groups, valid)
    trained = valid
    if settings.overlong_filtering:
        trained = trained & keeps_end
    if settings.filter_zero_spread:
        trained = trained & torch.tensor([group not in flat for group in groups], dtype=torch.bool)
    return StepSamples(
        trajectories=trajectories,
        failures=failures,
        rewards=rewards,
        shaped=shaped,
        valid=valid,
        trained=trained,
        advantages=_advantages(shaped, groups, valid, settings),
        zero_spread=flat,
    )


def check_rollouts(
    rollouts: Sequence[Trajectory | RolloutFailure], *, row_count: int, group_size: int, step: int
) -> None:
    """That the source kept its word: every rollout there once, each group contiguous with its own id.

    Raises:
        LoopError: naming the first thing that is wrong.
    """
    if len(rollouts) != row_count * group_size:
        raise LoopError(
            f"step {step}: the rollout source returned {len(rollouts)} rollouts for {row_count} rows of "
            f"{group_size}; each must come back as a trajectory or a failure"
        )
    seen: set[str] = set()
    for start in range(0, len(rollouts), group_size):
        ids = {rollout.group_id for rollout in rollouts[start : start + group_size]}
        if len(ids) != 1 or ids & seen:
            raise LoopError(
                f"step {step}: rollouts {start} to {start + group_size - 1} carry group ids {sorted(ids)}; "
                "a row needs one group id that no other row of the step has"
            )
        seen |= ids


def _environment_failed(trajectory: Trajectory) -> bool:
    return trajectory.stop_reason is StopReason.ENVIRONMENT_FAILURE


def _warn_of_missing_rewards(trajectories: Sequence[Trajectory], step: int) -> None:
    missing = [t for t in trajectories if t.reward is None and not _environment_failed(t)]
    if missing:
        logger.warning(
            "step %d: %d of %d rollouts have no reward and are excluded from training; the first is %s "
            "(group %s, agent %s)",
            step,
            len(missing),
            len(trajectories),
            missing[0].rollout_id,
            missing[0].group_id,
            missing[0].agent or "unnamed",
        )


def _shuffled(
    valid: torch.Tensor, rewards: torch.Tensor, shaped: torch.Tensor, *, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    holders = valid.nonzero().flatten()
    order = holders[torch.from_numpy(seeded_permutation(len(holders), seed, step, _SHUFFLE_KEY))]
    rewards, shaped = rewards.clone(), shaped.clone()
    rewards[holders], shaped[holders] = rewards[order], shaped[order]
    return rewards, shaped


def _advantages(
    shaped: torch.Tensor, groups: Sequence[str], valid: torch.Tensor, settings: GRPOSettings
) -> torch.Tensor:
    if settings.advantage == "rloo":
        return rloo_advantages(shaped, groups, valid)
    if settings.advantage == "dr_grpo":
        return dr_grpo_advantages(shaped, groups, valid)
    return grpo_advantages(
        shaped, groups, valid, leave_one_out=settings.leave_one_out, normalize=settings.normalize
    )
