"""One GRPO run, from a checked configuration to its summary."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from rl_algorithms.batching import TrainBatch, build_sft_batch
from rl_algorithms.checkpointing import Checkpoint, CheckpointStore
from rl_algorithms.loops import LoopResult, SFTSettings, StepReport, run_grpo, run_sft
from rl_algorithms.schedules import LearningRateSchedule
from rl_app_core.compose import Runtime, compose
from rl_app_core.config import RunConfig
from rl_app_core.demonstrations import demonstrate
from rl_app_core.interrupts import Interrupted, StopRequest
from rl_app_core.memory import peak_memory_mb
from rl_app_core.policy_plan import algorithm_optimizer
from rl_app_core.preflight import Prepared
from rl_app_core.reporting import RunReporter
from rl_app_core.rollouts import measure
from rl_app_core.run_directory import RunDirectory, Summary, append_record
from rl_gym_bridge.trajectory import Trajectory

from .engine_metrics import EngineMetrics, engine_summary
from .settings import loop_settings, policy_loss


def run_job(
    prepared: Prepared,
    directory: RunDirectory,
    reporter: RunReporter,
    *,
    began: float,
) -> Summary:
    """Warm-start the model, measure it, train it, measure it again.

    A run directory with a checkpoint is continued from the newest one; the supervised phase, which
    has none, starts over.

    Args:
        prepared: the checked configuration and its rows.
        directory: of the run; receives everything that is written.
        reporter: told of the progress.
        began: ``time.perf_counter()`` when the command started.

    Raises:
        Interrupted: a signal asked to stop; the directory can be resumed.
    """
    config = prepared.config
    store = CheckpointStore(
        directory.checkpoints,
        keep=config.checkpointing.keep,
        on_ignored=lambda message: reporter.line(f"ignored    {message}"),
    )
    resume_from = store.latest()
    resume_step = resume_from.step if resume_from is not None else None
    earlier = directory.elapsed_until(resume_step) if resume_step is not None else 0.0

    def elapsed() -> float:
        return earlier + time.perf_counter() - began

    engine = config.generation.engine
    reporter.line("starting   the worker" if engine == "megatron" else f"starting   the policy and {engine}")
    with compose(prepared, directory, elapsed, resume_step=resume_step) as runtime:
        policy = runtime.policy
        for url in runtime.base_urls:
            reporter.line(f"serving    {url}")
        reporter.line(
            f"model      {policy.description['parameters']:,} parameters; problems: "
            f"{len(prepared.problems.train):,} to train on, {len(prepared.problems.held_out):,} held out"
        )
        stop = StopRequest(lambda name: reporter.line(f"{name}: stopping at the next safe point"))
        with stop:
            if resume_from is None:
                _warm_start(prepared, runtime, reporter, stop)
            else:
                reporter.line(f"resumed    after step {resume_from.step}")
            result = _train(prepared, runtime, reporter, stop, directory, store, resume_from)
        if result.stopped:
            raise _interrupted(stop, f"stopped after step {result.steps_done}")
        held_out = {entry.step: entry.metrics["accuracy"] for entry in result.held_out}
        summary = Summary(
            steps=result.steps_done,
            held_out_before=held_out[0],
            held_out_after=held_out[result.steps_done],
            seconds=round(elapsed(), 2),
            tokens=result.tokens,
            seconds_generation=round(result.seconds_generation, 2),
            seconds_training=round(result.seconds_training, 2),
            peak_memory_mb=round(policy.peak_memory_mb() + peak_memory_mb(), 1),
            seed=config.seed,
            **engine_summary(directory.records()),
        )
    directory.write_summary(summary)
    return summary


def warm_start_batch(prepared: Prepared, runtime: Runtime, step: int) -> TrainBatch:
    """The demonstrations of one supervised step: a pure function of the seed and the step."""
    config = prepared.config
    warm = config.warm_start
    rng = random.Random(f"{config.seed}/warm-start/{step}")
    share = next(phase.share for phase in warm.phases if step <= phase.until_step)
    rows = rng.choices(prepared.problems.train, k=warm.batch_size)
    examples = [
        demonstrate(
            warm.demonstrations, row, prepared.environments[row.agent], share, rng, runtime.conversation
        )
        for row in rows
    ]
    return build_sft_batch(examples, runtime.conversation.pad_token_id)


def _warm_start(prepared: Prepared, runtime: Runtime, reporter: RunReporter, stop: StopRequest) -> None:
    config = prepared.config
    warm = config.warm_start
    if warm.steps:
        schedule = LearningRateSchedule(
            peak=warm.learning_rate,
            warmup_steps=warm.warmup_steps,
            decay="cosine",
            total_steps=warm.steps,
            floor=warm.final_share,
        )
        reporter.begin_phase("warm start", warm.steps)
        result = run_sft(
            settings=SFTSettings(warm.steps, schedule),
            policy=runtime.policy,
            batch_for_step=lambda step: warm_start_batch(prepared, runtime, step),
            on_step=lambda step, metrics: reporter.advance("warm start", step, {"loss": metrics["loss"]}),
            should_stop=lambda: stop.requested,
        )
        reporter.end_phase()
        if result.stopped:
            raise _interrupted(stop, f"stopped in the warm start after {result.steps_done} steps")
        runtime.policy.reset_optimizer(algorithm_optimizer(config))
    if config.algorithm.kl_coefficient:
        runtime.policy.keep_reference()


def _train(
    prepared: Prepared,
    runtime: Runtime,
    reporter: RunReporter,
    stop: StopRequest,
    directory: RunDirectory,
    store: CheckpointStore,
    resume_from: Checkpoint | None,
) -> LoopResult:
    config = prepared.config
    steps = config.algorithm.steps
    first = resume_from.step if resume_from is not None else 0

    def evaluate(step: int) -> Mapping[str, float]:
        found = measure(runtime.rollouts, prepared.problems.held_out, step=step)
        if step == 0:
            reporter.line(f"before     held-out accuracy {found['accuracy']:.3f}")
        return found

    measured = EngineMetrics(runtime.loggers, runtime.engine)
    reporter.begin_phase("grpo", steps, completed=first)
    try:
        return run_grpo(
            settings=loop_settings(config),
            rows=prepared.problems.train,
            rows_digest=prepared.problems.digest,
            source=runtime.rollouts,
            policy=runtime.policy,
            loss_fn=policy_loss(config),
            pad_token_id=runtime.conversation.pad_token_id,
            evaluate=evaluate,
            metrics_logger=measured,
            checkpoints=store,
            resume_from=resume_from,
            on_step=_watcher(config, reporter, directory, measured),
            should_stop=lambda: stop.requested,
        )
    finally:
        reporter.end_phase()


def _watcher(
    config: RunConfig, reporter: RunReporter, directory: RunDirectory, measured: EngineMetrics
) -> Callable[[StepReport], None]:
    told_of_a_skip = False

    def watch(report: StepReport) -> None:
        nonlocal told_of_a_skip
        metrics = report.metrics
        if metrics["skipped"] and not told_of_a_skip:
            told_of_a_skip = True
            reporter.line(_skip(report, config))
        held_out = metrics.get("held_out/accuracy")
        shown = {"reward": metrics["reward_mean"], "length": metrics["length_mean"]}
        if held_out is not None:
            shown["held-out accuracy"] = held_out
        if failures := metrics["failures_infra"] + metrics["failures_data"]:
            shown["failed rollouts"] = failures
        shown |= measured.shown
        reporter.advance("grpo", report.step, shown, measured=held_out is not None)
        for index, trajectory in enumerate(report.trajectories[: config.logging.rollouts_per_step]):
            record = _rollout_record(report.step, trajectory, float(report.advantages[index]))
            append_record(directory.rollouts_file, record)

    return watch


def _skip(report: StepReport, config: RunConfig) -> str:
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


def _interrupted(stop: StopRequest, what: str) -> Interrupted:
    assert stop.signal_number is not None
    return Interrupted(stop.signal_number, what)
