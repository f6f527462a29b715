"""What the engine measures of itself, beside the metrics of the step that it worked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_algorithms.protocols import MetricsLogger

from .rollout_engine import RolloutEngine
from .run_directory import Summary


class EngineMetrics:
    """A logger that adds the engine's numbers since the last entry to each entry.

    Attributes:
        shown: those of the last entry that a person wants to see.
    """

    def __init__(self, logger: MetricsLogger, engine: RolloutEngine) -> None:
        self._logger = logger
        self._engine = engine
        self.shown: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See :class:`rl_algorithms.protocols.MetricsLogger`."""
        measured = self._engine.take_metrics()
        self.shown = {
            label: measured[name]
            for label, name in (
                ("tokens/s", "generation_tokens_per_second"),
                ("refit s", "refit_seconds"),
            )
            if name in measured
        }
        if measured.get("replica_restarts"):
            self.shown["restarts"] = measured["replica_restarts"]
        self._logger.log(step, {**metrics, **measured})


def engine_summary(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The engine's part of the summary, from all logged steps of a run; resumed parts are among them."""
    sampled = [record for record in records if "engine_seconds" in record and "tokens" in record]
    seconds = sum(record["engine_seconds"] for record in sampled)
    gaps = [record for record in records if "logprob_gap_mean" in record]
    return {
        "generation_tokens_per_second": round(sum(r["tokens"] for r in sampled) / seconds, 1)
        if seconds
        else 0.0,
        "seconds_refit": round(sum(record.get("refit_seconds", 0.0) for record in records), 3),
        "logprob_gap_mean": sum(r["logprob_gap_mean"] for r in gaps) / len(gaps) if gaps else 0.0,
        "logprob_gap_max": max((record["logprob_gap_max"] for record in gaps), default=0.0),
    }


def engine_line(summary: Summary) -> str:
    """The same for a person."""
    known: list[str] = []
    if summary.generation_tokens_per_second:
        # Where a Gym asks over HTTP, nobody here sees how long sampling took.
        known.append(f"{summary.generation_tokens_per_second:,.0f} tokens/s")
    if summary.seconds_refit:
        known.append(f"{summary.seconds_refit:.1f} s of refits")
    speed = ", ".join(known) or "nothing measured"
    if not summary.logprob_gap_max:
        # A method that compares with a teacher alone does not score with the policy before it learns.
        return speed
    mean, largest = summary.logprob_gap_mean, summary.logprob_gap_max
    gap = f"{mean:.1g} nats on average, {largest:.1g} at most"
    return f"{speed}; log-probabilities differ from the policy's by {gap}"
