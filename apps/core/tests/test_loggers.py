"""What is logged: numbers, under their own names, and nothing that skips a step in silence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rl_app_core.loggers import Loggers


class Kept:
    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Any) -> None:
        self.entries.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def test_m4_a_mapping_for_a_metric_is_flattened() -> None:
    kept = Kept()
    Loggers([kept]).log(3, {"w": {0: 3, 1: 4, "deep": {"er": 5.0}}, "loss": 1.0})  # type: ignore[dict-item]
    assert kept.entries == [(3, {"w/0": 3, "w/1": 4, "w/deep/er": 5.0, "loss": 1.0})]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_says_so_and_leaves_no_gap(odd: float) -> None:
    kept = Kept()
    Loggers([kept]).log(1, {"loss": odd})
    assert kept.entries == [(1, {"loss/not_finite": 1.0})]


@pytest.mark.parametrize("value", ["3", None, True, [1.0]])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    kept = Kept()
    with pytest.raises(TypeError, match="metric 'a/b' is a"):
        Loggers([kept]).log(1, {"a": {"b": value}})  # type: ignore[dict-item]
    assert not kept.entries


def test_every_destination_is_told_and_closed_once() -> None:
    first, second = Kept(), Kept()
    loggers = Loggers([first, second])
    loggers.log(1, {"loss": 0.5})
    loggers.close()
    loggers.close()
    assert first.entries == second.entries == [(1, {"loss": 0.5})]
    assert (first.closed, second.closed) == (1, 1)
