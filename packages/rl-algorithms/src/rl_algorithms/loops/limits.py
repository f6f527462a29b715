"""What ends a run: settings that do not fit together, too many failures, too many empty steps."""

from __future__ import annotations

from rl_gym_bridge.trajectory import FailureKind

from ..method import Method
from .learn import UpdateReport
from .samples import StepSamples
from .settings import LoopSettings
from .state import LoopError, LoopState


def check_method(settings: LoopSettings, method: Method) -> None:
    """That the method can do as many updates per step, and use the samples, as the settings ask for.

    Raises:
        LoopError: it cannot.
    """
    uncorrected = not method.loss.needs.prev or getattr(method.loss, "one_update_only", False)
    if settings.updates_per_step > 1 and method.advantage.uses_rewards and uncorrected:
        raise LoopError(
            f"updates_per_step {settings.updates_per_step} with a loss that takes every update for "
            "on-policy: the second would not be corrected; use an objective with a ratio, or one update"
        )
    estimator = type(method.advantage).__name__
    if settings.group_size < 2 and getattr(method.advantage, "compares_members", False):
        raise LoopError(
            f"group_size 1 with {estimator}, which compares the members of a group: every advantage would be "
            "0; raise it"
        )
    filters = [name for name in ("dynamic_sampling", "filter_zero_spread") if getattr(settings, name)]
    if filters and not getattr(method.advantage, "silent_where_rewards_agree", True):
        raise LoopError(
            f"{filters[0]} leaves groups out whose rewards are all equal, and {estimator} learns from them "
            "too: turn it off"
        )
    if settings.dynamic_sampling and not method.advantage.uses_rewards:
        raise LoopError(
            "dynamic_sampling looks for groups whose rewards differ, and this method uses no rewards: "
            "turn it off"
        )


def check_failures(samples: StepSamples, settings: LoopSettings, step: int) -> None:
    """That no more rollouts of the step failed than the settings tolerate.

    Raises:
        LoopError: beyond the limit; with the first cause.
    """
    infra = [failure for failure in samples.failures if failure.kind is FailureKind.INFRA]
    if len(infra) > settings.max_infra_failures:
        raise LoopError(
            f"step {step}: {len(infra)} rollouts failed for want of infrastructure, max_infra_failures is "
            f"{settings.max_infra_failures}; the first, {infra[0].rollout_id} "
            f"(agent {infra[0].agent or 'unnamed'}): {infra[0].error}"
        )
    data, count = samples.failures_by_kind()[FailureKind.DATA.value], samples.rollouts
    if data > settings.max_data_failures_share * count:
        raise LoopError(
            f"step {step}: {data} of {count} rollouts failed for their data or environment, "
            f"max_data_failures_share is {settings.max_data_failures_share}; the first, "
            f"{samples.first_data_failure()}"
        )


def is_skipped(samples: StepSamples, update: UpdateReport, settings: LoopSettings) -> bool:
    """Whether a step made no update although not all of its answers are right."""
    if update.updates:
        return False
    rewards = samples.rewards[samples.trained & ~samples.rewards.isnan()]
    return not len(rewards) or bool((rewards < settings.success_reward).any())


def why_nothing(samples: StepSamples) -> str:
    """Why a step has made no update."""
    if samples.trained.any():
        return "the rewards of each of its groups are all equal, so no answer is better than another"
    cause = f": {samples.failures[0].error}" if samples.failures else ""
    return f"none of its samples is usable{cause}"


def check_skipped(state: LoopState, samples: StepSamples, settings: LoopSettings) -> None:
    """That not too many steps in a row had nothing to train on, or nothing to tell apart.

    Raises:
        LoopError: beyond the limit; with the first cause.
    """
    if state.skipped_in_a_row > settings.max_skipped_steps:
        raise LoopError(
            f"step {state.step}: {state.skipped_in_a_row} steps in a row trained nothing, "
            f"max_skipped_steps is {settings.max_skipped_steps}; in this step {why_nothing(samples)}"
        )
