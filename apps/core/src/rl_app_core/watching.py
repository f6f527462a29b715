"""What a person and rollouts.jsonl are told of every step."""

from __future__ import annotations

from collections.abc import Callable

from rl_algorithms.loops import StepReport
from rl_gym_bridge.trajectory import Trajectory

from .config import JobConfig
from .engine_metrics import EngineMetrics
from .reporting import RunReporter
from .run_directory import RunDirectory, append_record


def step_watcher(
    phase: str, config: JobConfig, reporter: RunReporter, directory: RunDirectory, measured: EngineMetrics
) -> Callable[[StepReport], None]:
    """A listener for the loop.

    Args:
        phase: what its lines begin with.
    """
    told_of_a_skip = False

    def watch(report: StepReport) -> None:
        nonlocal told_of_a_skip
        metrics = report.metrics
        if metrics["skipped"] and not told_of_a_skip:
            told_of_a_skip = True
            reporter.line(_skip(report, config))
        held_out = metrics.get("held_out/accuracy")
        shown = {"reward": metrics["reward_mean"], "length": metrics["length_mean"]}
        if "divergence" in metrics:
            shown["divergence"] = metrics["divergence"]
        if held_out is not None:
            shown["held-out accuracy"] = held_out
        if failures := metrics["failures_infra"] + metrics["failures_data"]:
            shown["failed rollouts"] = failures
        shown |= measured.shown
        reporter.advance(phase, report.step, shown, measured=held_out is not None)
        for index, trajectory in enumerate(report.trajectories[: config.logging.rollouts_per_step]):
            record = _rollout_record(report.step, trajectory, float(report.advantages[index]))
            append_record(directory.rollouts_file, record)

    return watch


def _skip(report: StepReport, config: JobConfig) -> str:
    why = "the answers of each group all have one reward" if report.trained.any() else "no answer is usable"
    return (
        f"warning    step {report.step} trains nothing: {why}; the run ends after more than "
        f"{config.algorithm.max_skipped_steps} such steps in a row (algorithm.max_skipped_steps)"
    )


def _rollout_record(step: int, trajectory: Trajectory, advantage: float) -> dict[str, object]:
    return {
        "step": step,
        "rollout_id": trajectory.rollout_id,
        "group_id": trajectory.group_id,
        "agent": trajectory.agent,
        "reward": trajectory.reward,
        "advantage": advantage,
        "stop_reason": trajectory.stop_reason.value,
        "text": trajectory.text,
        "token_ids": trajectory.token_ids,
        "token_mask": trajectory.token_mask,
        "logprobs": trajectory.logprobs,
        "weight_versions": trajectory.weight_versions,
        "metrics": dict(trajectory.metrics),
    }
