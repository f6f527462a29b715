"""The synchronous loop of every method: generate, judge, learn, and only then generate again.

Read :func:`run_sync` from top to bottom; each step of it is one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..checkpointing import Checkpoint, CheckpointStore
from ..method import Method
from ..protocols import MetricsLogger, PolicyTrainer, RolloutSource
from .collect import collect
from .learn import learn
from .limits import check_failures, check_method, check_skipped, is_skipped
from .persist import check_store, resumed, write_checkpoint
from .progress import advance, is_reached, measured, newest_score, report_of, step_metrics
from .samples import judge
from .settings import LoopSettings
from .state import LoopResult, LoopState, StepReport


def run_sync(
    *,
    settings: LoopSettings,
    method: Method,
    rows: Sequence[Any],
    rows_digest: str = "",
    source: RolloutSource,
    policy: PolicyTrainer,
    pad_token_id: int,
    evaluate: Callable[[int], Mapping[str, float]] | None = None,
    metrics_logger: MetricsLogger | None = None,
    checkpoints: CheckpointStore | None = None,
    resume_from: Checkpoint | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> LoopResult:
    """Train until ``settings.steps`` are done, an evaluation is good enough, or a stop is requested.

    A step: rows → rollouts → rewards → batch → scores → advantages → update(s) → evaluate → log →
    checkpoint. Which rows a step trains and how it samples depend on the seed, the step number and
    the rows drawn so far alone, so a resumed run continues exactly as an uninterrupted one.

    ``should_stop`` is asked between steps and again after the rollouts, when the step is discarded
    as if it had never begun. A checkpoint is written before the first step (so that a resume repeats
    no warm start), every ``checkpoint_every`` steps, after the last one, and on a stop of the last
    completed one. Metrics are logged once per step, under the step's own number; evaluations appear
    there as ``held_out/NAME``. A run that ends, rather than stops, always has a held-out measurement
    of its last step: one that resumes at its last step without it is measured then, and the
    measurement logged as an entry of its own.

    Args:
        method: how rollouts become updates.
        rows: what the rollout source understands; order and content must be the same on a resume.
        rows_digest: of the rows, whatever the caller computes (SHA-256 of their file, say). Stored
            in each checkpoint; a resume with another one is refused. Empty: not compared.
        evaluate: numbers about held-out rows after the given number of steps.
        checkpoints: where to write; each holds the policy and this loop's state.
        resume_from: a checkpoint of ``checkpoints`` to continue from; loads the policy.
        on_step: told of every finished step.

    Raises:
        LoopError: rollouts that break their contract, failures or unusable steps beyond the budget,
            a loss that is not finite, or a resume that does not continue the same run. The last
            checkpoint stays loadable.
        CheckpointError: a checkpoint that cannot be written or read.
    """
    check_method(settings, method)
    identity: dict[str, int | str] = {
        "rows": len(rows),
        "rows_digest": rows_digest,
        "prompts_per_step": settings.prompts_per_step,
        "seed": settings.seed,
    }
    check_store(checkpoints, resume_from)
    state = resumed(policy, resume_from, identity) if resume_from else LoopState()
    written = state.step if resume_from else None
    stopped = False

    if evaluate is not None and not state.held_out and not should_stop():
        _measure_between_steps(evaluate, state, metrics_logger)
    if checkpoints is not None and written is None:
        write_checkpoint(checkpoints, policy, state, identity, score=newest_score(state, settings))
        written = state.step

    while (
        state.step < settings.steps and not is_reached(state, settings) and _rows_left(state, rows, settings)
    ):
        step = state.step + 1
        if should_stop():
            stopped = True
            break

        began = time.perf_counter()
        collected = collect(
            source, rows, settings, position=state.rows_drawn, step=step, should_stop=should_stop
        )
        seconds_generation = time.perf_counter() - began
        if collected is None:
            stopped = True
            break

        samples = judge(
            collected.rollouts,
            settings,
            step,
            left_out=collected.left_out,
            uses_rewards=method.advantage.uses_rewards,
        )
        check_failures(samples, settings, step)
        began = time.perf_counter()
        update = learn(samples, method, settings, policy, pad_token_id=pad_token_id, step=step)
        seconds_training = time.perf_counter() - began

        skipped = is_skipped(samples, update, settings)
        advance(
            state,
            samples,
            rows=collected.rows_drawn,
            seconds_generation=seconds_generation,
            seconds_training=seconds_training,
            skipped=skipped,
        )
        metrics = collected.metrics() | step_metrics(
            samples,
            update,
            settings,
            step,
            skipped=skipped,
            seconds_generation=seconds_generation,
            seconds_training=seconds_training,
        )
        last = step == settings.steps or not _rows_left(state, rows, settings)
        if evaluate is not None and (last or _due(step, settings.evaluate_every)):
            metrics |= measured(evaluate, state)
        if metrics_logger is not None:
            metrics_logger.log(step, metrics)
        if on_step is not None:
            on_step(report_of(step, metrics, samples, update))
        check_skipped(state, samples, settings)
        last = last or is_reached(state, settings)
        if checkpoints is not None and (last or _due(step, settings.checkpoint_every)):
            write_checkpoint(checkpoints, policy, state, identity, score=newest_score(state, settings))
            written = step

    if evaluate is not None and not stopped and all(entry.step != state.step for entry in state.held_out):
        _measure_between_steps(evaluate, state, metrics_logger)
    if stopped and checkpoints is not None and written != state.step:
        write_checkpoint(checkpoints, policy, state, identity, score=newest_score(state, settings))
    return state.result(stopped=stopped, reached=is_reached(state, settings))


def _rows_left(state: LoopState, rows: Sequence[Any], settings: LoopSettings) -> bool:
    """Whether the epochs hold another whole step."""
    if settings.max_epochs is None:
        return True
    return state.rows_drawn + settings.prompts_per_step <= settings.max_epochs * len(rows)


def _measure_between_steps(
    evaluate: Callable[[int], Mapping[str, float]], state: LoopState, metrics_logger: MetricsLogger | None
) -> None:
    held_out = measured(evaluate, state)
    if metrics_logger is not None:
        metrics_logger.log(state.step, held_out)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
