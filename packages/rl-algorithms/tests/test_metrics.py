from __future__ import annotations

import math

import pytest

from rl_algorithms.metrics import ExpMean, Max, Mean, Min, Sum, merge_metrics


def test_d15_each_metric_has_its_own_denominator():
    merged = merge_metrics(
        [
            {"token_loss": Mean(40.0, 20), "per_sequence": Mean(2.0, 2), "low": Min(3.0)},
            {"token_loss": Mean(20.0, 10), "per_sequence": Mean(1.0, 1), "high": Max(4.0), "low": Min(1.0)},
        ]
    )
    assert merged["token_loss"].value() == 2.0
    assert merged["per_sequence"].value() == 1.0
    assert (merged["low"].value(), merged["high"].value()) == (1.0, 4.0)


def test_d17_uneven_parts_are_not_a_mean_of_means():
    assert merge_metrics([{"x": Mean(4.0, 1)}, {"x": Mean(0.0, 3)}])["x"].value() == 1.0


def test_empty_metrics_are_finite():
    empty = [Mean(0.0, 0), Max(), Min(), ExpMean(0.0, 0), Sum(0.0), ExpMean(1e6, 1)]
    assert all(math.isfinite(metric.value()) for metric in empty)


def test_one_name_is_one_kind():
    with pytest.raises(TypeError, match="'x' is a Mean and a Sum"):
        merge_metrics([{"x": Mean(1.0, 1)}, {"x": Sum(1.0)}])
