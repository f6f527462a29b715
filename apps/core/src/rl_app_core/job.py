"""One run of a trainer, from a checked configuration to its summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rl_algorithms.checkpointing import Checkpoint, CheckpointStore
from rl_algorithms.loops import LoopResult, LoopSettings, StepReport, run_sync
from rl_algorithms.method import Method

from .compose import Runtime, compose
from .engine_metrics import EngineMetrics, engine_summary
from .interrupts import StopRequest
from .memory import peak_memory_mb
from .preflight import Prepared
from .reporting import RunReporter
from .rollouts import measure
from .run_directory import RunDirectory, Summary
from .warm_start import warm_start
from .watching import step_watcher


@dataclass(frozen=True, slots=True)
class Loop:
    """All that a loop needs of a run.

    Attributes:
        prepared: the checked configuration and its rows.
        settings: of the loop.
        method: what is learnt by.
        runtime: the living parts.
        directory: of the run.
        checkpoints: where they are written.
        resume_from: the one that is continued.
        evaluate: numbers about held-out rows after the given number of steps.
        metrics: where each step's numbers go.
        on_step: told of every finished step.
        stop: whether somebody wants the run to end.
        say: tells a person a line.
    """

    prepared: Prepared
    settings: LoopSettings
    method: Method
    runtime: Runtime
    directory: RunDirectory
    checkpoints: CheckpointStore
    resume_from: Checkpoint | None
    evaluate: Callable[[int], Mapping[str, float]]
    metrics: EngineMetrics
    on_step: Callable[[StepReport], None]
    stop: StopRequest
    say: Callable[[str], None]


def synchronous(loop: Loop) -> LoopResult:
    """Generate, learn, and only then generate again."""
    return run_sync(
        settings=loop.settings,
        rows=loop.prepared.problems.train,
        rows_digest=loop.prepared.problems.digest,
        source=loop.runtime.rollouts,
        policy=loop.runtime.policy,
        method=loop.method,
        pad_token_id=loop.runtime.conversation.pad_token_id,
        evaluate=loop.evaluate,
        metrics_logger=loop.metrics,
        checkpoints=loop.checkpoints,
        resume_from=loop.resume_from,
        on_step=loop.on_step,
        should_stop=lambda: loop.stop.requested,
    )


@dataclass(frozen=True, slots=True)
class Trainer:
    """What an application adds to the job that all share.

    Attributes:
        phase: what the lines of its steps begin with.
        settings: of the loop.
        method: given the living parts of the run, what it learns by, for as long as the block lasts.
        actors: Ray actors that ``method`` starts.
        loop: how rollouts and training take turns.
    """

    phase: str
    settings: LoopSettings
    method: Callable[[Runtime], AbstractContextManager[Method]]
    actors: int = 0
    loop: Callable[[Loop], LoopResult] = synchronous


def run_job(
    prepared: Prepared,
    trainer: Trainer,
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
        trainer: what is trained, and how.
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
        keep_best=config.checkpointing.keep_best,
        on_ignored=lambda message: reporter.line(f"ignored    {message}"),
    )
    resume_from = store.latest()
    resume_step = resume_from.step if resume_from is not None else None
    earlier = directory.elapsed_until(resume_step) if resume_step is not None else 0.0

    def elapsed() -> float:
        return earlier + time.perf_counter() - began

    engine = config.generation.engine
    reporter.line("starting   the worker" if engine == "megatron" else f"starting   the policy and {engine}")
    with compose(
        prepared, directory, elapsed, resume_step=resume_step, more_actors=trainer.actors
    ) as runtime:
        policy = runtime.policy
        for url in runtime.base_urls:
            reporter.line(f"serving    {url}")
        reporter.line(
            f"model      {policy.description['parameters']:,} parameters; problems: "
            f"{len(prepared.problems.train):,} to train on, {len(prepared.problems.held_out):,} held out"
        )
        stop = StopRequest(lambda name: reporter.line(f"{name}: stopping at the next safe point"))
        with stop, trainer.method(runtime) as method:
            if resume_from is None:
                warm_start(prepared, runtime, reporter, stop)
                if method.needs.reference:
                    policy.keep_reference()
            else:
                reporter.line(f"resumed    after step {resume_from.step}")
            result = _train(prepared, trainer, method, runtime, reporter, stop, directory, store, resume_from)
        if result.reached:
            reporter.line(f"reached    evaluation.stop_at={config.evaluation.stop_at}")
        if result.stopped:
            raise stop.interrupted(f"stopped after step {result.steps_done}")
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


def _train(
    prepared: Prepared,
    trainer: Trainer,
    method: Method,
    runtime: Runtime,
    reporter: RunReporter,
    stop: StopRequest,
    directory: RunDirectory,
    store: CheckpointStore,
    resume_from: Checkpoint | None,
) -> LoopResult:
    config = prepared.config
    first = resume_from.step if resume_from is not None else 0

    def evaluate(step: int) -> Mapping[str, float]:
        found = measure(runtime.rollouts, prepared.problems.held_out, step=step, evaluation=config.evaluation)
        if step == 0:
            reporter.line(f"before     held-out accuracy {found['accuracy']:.3f}")
        return found

    measured = EngineMetrics(runtime.loggers, runtime.engine)
    reporter.begin_phase(trainer.phase, trainer.settings.steps, completed=first)
    try:
        return trainer.loop(
            Loop(
                prepared=prepared,
                settings=trainer.settings,
                method=method,
                runtime=runtime,
                directory=directory,
                checkpoints=store,
                resume_from=resume_from,
                evaluate=evaluate,
                metrics=measured,
                on_step=step_watcher(trainer.phase, config, reporter, directory, measured),
                stop=stop,
                say=reporter.line,
            )
        )
    finally:
        reporter.end_phase()
