"""The engine's numbers beside those of the step, on the screen and in the summary."""

from __future__ import annotations

import pytest

from rl_app_core.engine_metrics import EngineMetrics, engine_line, engine_summary
from rl_app_core.run_directory import Summary


class Engine:
    def __init__(self, *metrics):
        self.metrics = list(metrics)

    def take_metrics(self):
        return self.metrics.pop(0)


class Recorder:
    def __init__(self):
        self.entries = []

    def log(self, step, metrics):
        self.entries.append((step, dict(metrics)))


RECORDS = [
    {"step": 0, "refit_seconds": 0.5, "held_out/accuracy": 0.1},
    {
        **{"step": 1, "tokens": 100, "engine_seconds": 2.0, "refit_seconds": 0.25},
        **{"logprob_gap_mean": 1e-6, "logprob_gap_max": 3e-5},
    },
    {
        **{"step": 2, "tokens": 300, "engine_seconds": 2.0, "refit_seconds": 0.25},
        **{"logprob_gap_mean": 3e-6, "logprob_gap_max": 2e-5},
    },
    {"step": 3, "tokens": 50, "skipped": 1.0},
]


def test_each_step_is_logged_with_what_the_engine_did_for_it():
    recorder = Recorder()
    engine = Engine(
        {"refit_seconds": 0.5, "replicas_serving": 2.0},
        {"generation_tokens_per_second": 50.0, "engine_seconds": 2.0, "replica_restarts": 1.0},
    )
    metrics = EngineMetrics(recorder, engine)
    metrics.log(0, {"held_out/accuracy": 0.1})
    assert metrics.shown == {"refit s": 0.5}
    metrics.log(1, {"reward_mean": 0.2})
    assert metrics.shown == {"tokens/s": 50.0, "restarts": 1.0}
    assert recorder.entries == [
        (0, {"held_out/accuracy": 0.1, "refit_seconds": 0.5, "replicas_serving": 2.0}),
        (
            1,
            {
                **{"reward_mean": 0.2, "generation_tokens_per_second": 50.0, "engine_seconds": 2.0},
                "replica_restarts": 1.0,
            },
        ),
    ]


def test_the_summary_covers_all_steps_that_were_measured():
    assert engine_summary(RECORDS) == {
        "generation_tokens_per_second": 100.0,
        "seconds_refit": 1.0,
        "logprob_gap_mean": pytest.approx(2e-6),
        "logprob_gap_max": 3e-5,
    }
    assert set(engine_summary([]).values()) == {0.0}


def test_a_person_is_told_in_one_line():
    summary = Summary(3, 0.1, 0.9, 1.0, 450, 1.0, 1.0, 1.0, 0, **engine_summary(RECORDS))
    assert engine_line(summary) == (
        "100 tokens/s, 1.0 s of refits; log-probabilities differ from the policy's by 2e-06 nats on average, "
        "3e-05 at most"
    )
