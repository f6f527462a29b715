"""K10: errors keep class, message, fields and fault when they cross a process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from rl_gym_bridge import failures
from rl_gym_bridge.failures import (
    GymContinuityError,
    GymError,
    GymHttpError,
    GymInvalidSample,
    RolloutCountError,
    kind_of,
)
from rl_gym_bridge.trajectory import FailureKind

DETAILS: dict[str, Any] = {
    "component": "mcqa_simple_agent",
    "address": "http://127.0.0.1:1/run",
    "attempts": 3,
    "elapsed_s": 1.5,
    "remedy": "wait",
}
OWN: dict[type[GymError], dict[str, Any]] = {
    GymHttpError: {"status": 503, "body": "slow down"},
    GymContinuityError: {"turn": 2, "index": 3, "got": None, "want": 4},
    GymInvalidSample: {"failure_kind": "judge_failed", "infra": True},
    RolloutCountError: {"missing": ("g/0", "g/1")},
}


def classes(cls: type[GymError] = GymError) -> list[type[GymError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in classes(sub))]


NAMED = [cls for cls in classes() if cls.__module__ == failures.__name__]


def test_every_class_is_here() -> None:
    public = {
        value for value in vars(failures).values() if isinstance(value, type) and issubclass(value, GymError)
    }
    assert public == set(NAMED)


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_k10_a_round_trip_keeps_class_message_fields_and_kind(cls: type[GymError]) -> None:
    """K10: also after a second crossing."""
    error = cls("it broke", **DETAILS, **OWN.get(cls, {}))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(pickle.loads(pickle.dumps(error)))):
        assert type(again) is cls
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.kind is error.kind
        for name, value in {**DETAILS, **OWN.get(cls, {})}.items():
            assert getattr(again, name) == value


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, FailureKind.INFRA),
        (500, FailureKind.INFRA),
        (408, FailureKind.INFRA),
        (400, FailureKind.DATA),
        (422, FailureKind.DATA),
    ],
)
def test_k10_the_status_decides_whose_fault_it_is_on_either_side(status: int, kind: FailureKind) -> None:
    """K10: 429 and 500 are infra, 400 is data."""
    again = pickle.loads(pickle.dumps(GymHttpError("no", status=status)))
    assert (again.status, again.kind) == (status, kind)


def test_an_error_that_nobody_classified_is_data() -> None:
    assert kind_of(ValueError("x")) is FailureKind.DATA
    assert kind_of(TimeoutError("x")) is FailureKind.DATA


@pytest.mark.parametrize("infra", [True, False])
def test_a_disowned_sample_is_the_fault_of_what_disowned_it(infra: bool) -> None:
    again = pickle.loads(pickle.dumps(GymInvalidSample("x", infra=infra)))
    assert kind_of(again) is (FailureKind.INFRA if infra else FailureKind.DATA)
