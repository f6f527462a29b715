"""One step's rollouts turned into judged samples: who counts, and what it earned."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory

from ..filters import not_truncated, zero_spread_groups
from .rows import seeded_permutation
from .settings import LoopSettings
from .state import LoopError

logger = logging.getLogger(__name__)

_SHUFFLE_KEY = 1


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one step, in the order of their rollouts. Tensors are ``[N]``, floats float64.

    Attributes:
        trajectories: N finished rollouts.
        failures: rollouts that are no sample, those of groups left out among them.
        left_out: finished rollouts of groups that dynamic sampling left out; counted, not trained.
        rewards: unshaped; as the environment gave them, or permuted among the valid samples by
            ``shuffle_rewards``. NaN where the environment gave none.
        shaped: what advantages are made of; permuted alike.
        valid: in the baseline of its group.
        trained: enters the loss.
        zero_spread: groups whose unshaped rewards are all equal.
    """

    trajectories: list[Trajectory]
    failures: list[RolloutFailure]
    rewards: torch.Tensor
    shaped: torch.Tensor
    valid: torch.Tensor
    trained: torch.Tensor
    zero_spread: frozenset[str]
    left_out: tuple[Trajectory, ...] = ()

    @property
    def group_ids(self) -> list[str]:
        """Of each trajectory."""
        return [trajectory.group_id for trajectory in self.trajectories]

    @property
    def components(self) -> dict[str, torch.Tensor]:
        """Named parts of the rewards, ``[N]`` float64 each, NaN where a rollout lacks one."""
        names = sorted({name for trajectory in self.trajectories for name in trajectory.reward_components})
        missing = float("nan")
        return {
            name: torch.tensor(
                [t.reward_components.get(name, missing) for t in self.trajectories], dtype=torch.float64
            )
            for name in names
        }

    @property
    def tokens(self) -> int:
        """Sampled ones, of forks and of groups left out as well."""
        return sum(
            sequence.sampled_tokens
            for trajectory in (*self.trajectories, *self.left_out)
            for sequence in (trajectory, *trajectory.forks)
        )

    @property
    def rollouts(self) -> int:
        """How many there were, finished or failed."""
        return len(self.trajectories) + len(self.left_out) + len(self.failures)

    def failures_by_kind(self) -> dict[str, int]:
        """Failed rollouts by kind; an environment that failed in mid-rollout counts as data."""
        counts = Counter({kind.value: 0 for kind in FailureKind})
        counts.update(failure.kind.value for failure in self.failures)
        counts[FailureKind.DATA.value] += sum(
            _environment_failed(t) for t in (*self.trajectories, *self.left_out)
        )
        return dict(counts)

    def first_data_failure(self) -> str:
        """Which rollout of kind data failed first, of which agent, and why; empty if none did."""
        for failure in self.failures:
            if failure.kind is FailureKind.DATA:
                return f"{failure.rollout_id} (agent {failure.agent or 'unnamed'}): {failure.error}"
        for trajectory in filter(_environment_failed, (*self.trajectories, *self.left_out)):
            return (
                f"{trajectory.rollout_id} (agent {trajectory.agent or 'unnamed'}): the environment failed in "
                "mid-rollout"
            )
        return ""

    def metrics(self, settings: LoopSettings) -> dict[str, float]:
        """Rewards and accuracy over valid samples, lengths and truncation over all trajectories."""
        paid = self.valid & ~torch.isnan(self.rewards)
        valid = max(int(paid.sum()), 1)
        count = max(len(self.trajectories), 1)
        rewards, shaped = self.rewards[paid], self.shaped[paid]
        truncated = sum(trajectory.stop_reason.truncated for trajectory in self.trajectories)
        failures = {f"failures_{kind}": float(n) for kind, n in self.failures_by_kind().items()}
        return {
            "reward_mean": float(rewards.sum()) / valid,
            "reward_shaped_mean": float(shaped.sum()) / valid,
            "accuracy": float((rewards >= settings.success_reward).sum()) / valid,
            "truncated_share": truncated / count,
            "length_mean": sum(trajectory.sampled_tokens for trajectory in self.trajectories) / count,
            "tokens": float(self.tokens),
            "groups": float(len({trajectory.group_id for trajectory in self.trajectories})),
            "zero_spread_groups": float(len(self.zero_spread)),
            "samples_valid": float(self.valid.sum()),
            "samples_trained": float(self.trained.sum()),
            "samples_without_reward": float(sum(t.reward is None for t in self.trajectories)),
            "samples_without_tokens": float(sum(t.sampled_tokens == 0 for t in self.trajectories)),
            **failures,
        }


def judge(
    rollouts: Sequence[Trajectory | RolloutFailure],
    settings: LoopSettings,
    step: int,
    *,
    left_out: Sequence[Trajectory | RolloutFailure] = (),
    uses_rewards: bool = True,
) -> StepSamples:
    """Rewards, shaping and filters of one step. A failed rollout never becomes a reward.

    A rollout that its environment gave no reward is excluded with a warning: neither 0 nor NaN. Where the
    method does not use rewards, such a rollout counts all the same, and no group is too much alike.
    """
    trajectories = [rollout for rollout in rollouts if isinstance(rollout, Trajectory)]
    failures = [rollout for rollout in (*rollouts, *left_out) if isinstance(rollout, RolloutFailure)]
    lengths = torch.tensor([trajectory.sampled_tokens for trajectory in trajectories], dtype=torch.int64)
    keeps_end = not_truncated([trajectory.stop_reason for trajectory in trajectories])
    rewards = torch.tensor(
        [float("nan") if t.reward is None else t.reward for t in trajectories], dtype=torch.float64
    )
    failed = torch.tensor([_environment_failed(t) for t in trajectories], dtype=torch.bool)
    valid = (lengths > 0) & ~failed
    if uses_rewards:
        _warn_of_missing_rewards(trajectories, step)
        valid = valid & ~torch.isnan(rewards)
    shaped = settings.shaping(rewards, trajectories)
    if settings.shuffle_rewards:
        rewards, shaped = _shuffled(valid, rewards, shaped, seed=settings.seed, step=step)

    groups = [trajectory.group_id for trajectory in trajectories]
    flat = zero_spread_groups(rewards, groups, valid) if uses_rewards else frozenset()
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
        zero_spread=flat,
        left_out=tuple(rollout for rollout in left_out if isinstance(rollout, Trajectory)),
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
