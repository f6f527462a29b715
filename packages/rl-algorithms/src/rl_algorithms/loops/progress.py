"""What every loop does around a step: counting it, measuring it, telling of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from .learn import UpdateReport
from .limits import why_nothing
from .samples import StepSamples
from .settings import LoopSettings
from .state import HeldOut, LoopState, StepReport

logger = logging.getLogger(__name__)

Evaluation = Callable[[int], Mapping[str, float]]


def newest_score(state: LoopState, settings: LoopSettings) -> float | None:
    """The newest evaluation's ``stop_metric``, if it is of this very step."""
    newest = state.held_out[-1] if state.held_out else None
    if newest is None or newest.step != state.step:
        return None
    return newest.metrics.get(settings.stop_metric)


def is_reached(state: LoopState, settings: LoopSettings) -> bool:
    """Whether the newest evaluation ends the run."""
    score = newest_score(state, settings)
    return settings.stop_at is not None and score is not None and score >= settings.stop_at


def measured(evaluate: Evaluation, state: LoopState) -> dict[str, float]:
    """Evaluate the present step; its numbers, ready to log."""
    began = time.perf_counter()
    found = {name: float(value) for name, value in evaluate(state.step).items()}
    state.seconds_evaluation += time.perf_counter() - began
    state.held_out.append(HeldOut(state.step, found))
    return {f"held_out/{name}": value for name, value in found.items()}


def advance(
    state: LoopState,
    samples: StepSamples,
    *,
    rows: int,
    seconds_generation: float,
    seconds_training: float,
    skipped: bool,
) -> None:
    """One more step is done, with ``rows`` further rows."""
    state.step += 1
    state.rows_drawn += rows
    state.tokens += samples.tokens
    state.seconds_generation += seconds_generation
    state.seconds_training += seconds_training
    for kind, count in samples.failures_by_kind().items():
        state.failures[kind] = state.failures.get(kind, 0) + count
    if not skipped:
        state.skipped_in_a_row = 0
        return
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row == 1:
        logger.warning("step %d trains nothing: %s", state.step, why_nothing(samples))


def step_metrics(
    samples: StepSamples,
    update: UpdateReport,
    settings: LoopSettings,
    step: int,
    *,
    skipped: bool,
    seconds_generation: float,
    seconds_training: float,
) -> dict[str, float]:
    """The numbers of a step that every loop has."""
    return {
        **samples.metrics(settings),
        **update.metrics,
        "updates": float(update.updates),
        "skipped": float(skipped),
        "learning_rate": settings.schedule(step),
        "seconds_generation": seconds_generation,
        "seconds_training": seconds_training,
    }


def report_of(
    step: int, metrics: Mapping[str, float], samples: StepSamples, update: UpdateReport
) -> StepReport:
    """The step, for whoever watches."""
    return StepReport(
        step=step,
        metrics=metrics,
        trajectories=samples.trajectories,
        failures=samples.failures,
        advantages=update.advantages,
        trained=samples.trained,
    )
