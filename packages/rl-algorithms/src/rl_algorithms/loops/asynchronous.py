"""The training half of an asynchronous run: what a controller's commands do to the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, Trajectory

from ..checkpoint_files import read_json, write_json
from ..checkpointing import Checkpoint, CheckpointStore
from ..controller import Counters, Snapshot
from ..group_files import groups_from_json, groups_to_json
from ..method import Method
from ..protocols import MetricsLogger, PolicyTrainer
from ..replay import Group, Missing
from ..staleness import lag
from .learn import learn
from .limits import check_failures, check_method, check_skipped, is_skipped
from .persist import Identity, resumed, write_checkpoint
from .progress import (
    Evaluation,
    advance,
    is_reached,
    measured,
    newest_score,
    report_of,
    step_metrics,
)
from .samples import judge
from .settings import LoopSettings
from .state import LoopError, LoopState, StepReport

CONTROLLER_FILE = "controller.json"
GROUPS_FILE = "groups.json"


class AsyncTrainer:
    """Trains, evaluates and saves; one call at a time, from whichever thread.

    Args:
        settings: of the loop. Dynamic sampling is refused: it would play rows that no step is bound to train.
        method: how rollouts become updates.
        policy: what is trained.
        pad_token_id: of the tokenizer.
        identity: what must be the same for a resume to train the same rows.
        evaluate: numbers about held-out rows after the given number of steps.
        metrics_logger: told of every step once, under its own number.
        checkpoints: where to write.
        state: of a resumed run.
        on_step: told of every finished step.
        on_trained: told of the groups of a step as soon as they are trained.

    Raises:
        LoopError: method and settings do not go together.
    """

    def __init__(
        self,
        *,
        settings: LoopSettings,
        method: Method,
        policy: PolicyTrainer,
        pad_token_id: int,
        identity: Identity,
        evaluate: Evaluation,
        metrics_logger: MetricsLogger,
        checkpoints: CheckpointStore,
        state: LoopState | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        on_trained: Callable[[int, Sequence[Group]], None] | None = None,
    ) -> None:
        check_asynchronous(settings, method)
        self.settings = settings
        self.state = state or LoopState()
        self._method = method
        self._policy = policy
        self._pad_token_id = pad_token_id
        self._identity = identity
        self._evaluate = evaluate
        self._logger = metrics_logger
        self._checkpoints = checkpoints
        self._on_step = on_step or (lambda report: None)
        self._on_trained = on_trained or (lambda version, groups: None)
        self._unlogged: StepReport | None = None
        self._idle_since = time.perf_counter()

    def train(self, version: int, groups: Sequence[Group], counters: Counters) -> None:
        """The step that leads to ``version``. Its numbers are logged with those of its evaluation, or by
        :meth:`flush`.

        Raises:
            LoopError: as :func:`~rl_algorithms.loops.sync.run_sync`.
        """
        self.flush()
        waited = time.perf_counter() - self._idle_since
        settings = self.settings
        ordered = sorted(groups, key=lambda group: group.position)
        stragglers = sum(group.stragglers for group in ordered)
        samples = judge(
            [outcome for group in ordered for outcome in _outcomes(group)],
            settings,
            version,
            uses_rewards=self._method.advantage.uses_rewards,
        )
        # Those were given up by choice.
        tolerant = replace(settings, max_infra_failures=settings.max_infra_failures + stragglers)
        check_failures(samples, tolerant, version)
        began = time.perf_counter()
        update = learn(
            samples, self._method, settings, self._policy, pad_token_id=self._pad_token_id, step=version
        )
        seconds = time.perf_counter() - began
        self._on_trained(version, ordered)
        skipped = is_skipped(samples, update, settings)
        advance(
            self.state,
            samples,
            rows=len(ordered),
            seconds_generation=waited,
            seconds_training=seconds,
            skipped=skipped,
        )
        metrics = step_metrics(
            samples,
            update,
            settings,
            version,
            skipped=skipped,
            seconds_generation=waited,
            seconds_training=seconds,
        )
        metrics |= staleness_metrics(ordered, version - 1) | counter_metrics(counters)
        self._unlogged = report_of(version, metrics, samples, update)
        try:
            check_skipped(self.state, samples, settings)
        except LoopError:
            self.flush()
            raise
        self._idle_since = time.perf_counter()

    def evaluate(self, version: int) -> bool:
        """Measure the weights of ``version``; whether that ends the run."""
        held_out = measured(self._evaluate, self.state)
        if self._unlogged is None:
            self._logger.log(version, held_out)
        else:
            self._unlogged = replace(self._unlogged, metrics={**self._unlogged.metrics, **held_out})
            self.flush()
        self._idle_since = time.perf_counter()
        return is_reached(self.state, self.settings)

    def save(self, version: int, snapshot: Snapshot) -> None:
        """A checkpoint of policy, loop and controller, published as one.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.flush()

        def add(folder: Path) -> None:
            write_json(folder / CONTROLLER_FILE, snapshot.to_json())
            write_json(folder / GROUPS_FILE, groups_to_json(snapshot.ready))

        score = newest_score(self.state, self.settings)
        write_checkpoint(self._checkpoints, self._policy, self.state, self._identity, score=score, add=add)
        self._idle_since = time.perf_counter()

    def flush(self) -> None:
        """Log the last step, if that is still to be done."""
        report, self._unlogged = self._unlogged, None
        if report is not None:
            self._logger.log(report.step, report.metrics)
            self._on_step(report)


def resume_controller(
    policy: PolicyTrainer, checkpoint: Checkpoint, identity: Identity
) -> tuple[LoopState, Snapshot]:
    """What the checkpoint of an asynchronous run holds; the policy is loaded.

    Raises:
        LoopError: the checkpoint is of another run.
        CheckpointError: it cannot be read.
        SnapshotError: it was written by another version.
    """
    state = resumed(policy, checkpoint, identity)
    ready = groups_from_json(read_json(checkpoint.path / GROUPS_FILE))
    return state, Snapshot.from_json(read_json(checkpoint.path / CONTROLLER_FILE), ready)


def check_asynchronous(settings: LoopSettings, method: Method) -> None:
    """That the settings can be meant for rollouts that run ahead of training.

    Raises:
        LoopError: they cannot.
    """
    check_method(settings, method)
    if settings.dynamic_sampling:
        raise LoopError(
            "dynamic_sampling plays further rows within a step, and here rows are played ahead of their "
            "steps: turn it off, and filter_zero_spread on if groups without a signal should not count"
        )


def staleness_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """How old the groups of a step are, which begins with version ``step``; in steps."""
    lags = [lag(step, group.oldest) for group in groups]
    mixed = sum(group.newest > group.oldest for group in groups)
    return {
        "staleness_mean": sum(lags) / len(lags),
        "staleness_max": float(max(lags)),
        "groups_of_several_versions": float(mixed),
        "stragglers": float(sum(group.stragglers for group in groups)),
    }


def counter_metrics(counters: Counters) -> dict[str, float]:
    """What the controller has counted since the beginning of the run."""
    return {f"controller/{name}": float(value) for name, value in counters.to_json().items()}


def _outcomes(group: Group) -> list[Trajectory | RolloutFailure]:
    return [
        RolloutFailure(
            group_id=f"train/{group.position}",
            rollout_id=f"train/{group.position}/{outcome.index}",
            agent="",
            kind=FailureKind.INFRA,
            error=outcome.why,
        )
        if isinstance(outcome, Missing)
        else outcome
        for outcome in group.outcomes
    ]
