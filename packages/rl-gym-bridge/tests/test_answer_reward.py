"""Rewards and their parts: bounds, the sum check, and samples that Gym itself disowns."""

from __future__ import annotations

from typing import Any

import pytest

from rl_gym_bridge.failures import GymAnswerError, GymInvalidSample, GymRewardError, kind_of
from rl_gym_bridge.postprocess import postprocess_nemo_gym_result
from rl_gym_bridge.trajectory import FailureKind, Trajectory

ITEM = {
    "type": "message",
    "role": "assistant",
    "content": "x",
    "prompt_token_ids": [1],
    "generation_token_ids": [2],
    "generation_log_probs": [-0.5],
}


def judged(settings: dict[str, Any] | None = None, **top: Any) -> Trajectory:
    return postprocess_nemo_gym_result({"response": {"output": [ITEM]}, **top}, **(settings or {}))


@pytest.mark.parametrize("reward", [0, 1, -2.5, 1e6, -1e6])
def test_a_finite_reward_is_taken(reward: float) -> None:
    made = judged(reward=reward)
    assert made.reward == reward
    assert type(made.reward) is float


def test_no_reward_is_null_and_stays_so() -> None:
    assert judged(reward=None).reward is None


def test_a_missing_reward_is_refused() -> None:
    with pytest.raises(GymRewardError, match="no reward"):
        judged()


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), float("-inf"), 1e9, -1e9, 10**400, True, "1.0", [1]]
)
def test_n4_a_reward_that_is_no_number_within_bounds_is_refused(reward: Any) -> None:
    """N4: a reply with 1e9 or NaN."""
    with pytest.raises(GymRewardError, match="reward is"):
        judged(reward=reward)


def test_n4_three_rewards_for_one_answer_are_refused() -> None:
    """N4: more rewards than queries."""
    with pytest.raises(GymRewardError):
        judged(reward=[1.0, 0.0, 1.0])


def test_the_bound_is_a_setting() -> None:
    assert judged({"max_abs_reward": 1e10}, reward=1e9).reward == 1e9
    with pytest.raises(GymRewardError, match="within ±1"):
        judged({"max_abs_reward": 1.0}, reward=1.5)


def test_components_that_sum_to_the_reward_are_kept() -> None:
    made = judged(reward=0.3, reward_components={"format": 0.1, "answer": 0.2})
    assert made.reward_components == {"format": 0.1, "answer": 0.2}
    assert judged(reward=0.3).reward_components == {}
    assert judged(reward=0.3, reward_components=None).reward_components == {}


def test_components_that_do_not_sum_to_the_reward_name_both_numbers() -> None:
    with pytest.raises(GymRewardError, match=r"reward is 1\.0.*sum to 0\.75"):
        judged(reward=1.0, reward_components={"a": 0.5, "b": 0.25})


@pytest.mark.parametrize(("offset", "fits"), [(0.9e-6, True), (1.1e-6, False)])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_sum_may_be_off_by_a_millionth_of_its_scale(offset: float, fits: bool, scale: float) -> None:
    parts = {"a": scale, "b": -scale / 2 + offset * scale}
    if fits:
        judged(reward=scale / 2, reward_components=parts)
    else:
        with pytest.raises(GymRewardError):
            judged(reward=scale / 2, reward_components=parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e6, True, None, "1"])
def test_c10_a_component_out_of_range_is_refused(value: Any) -> None:
    """C10: a rating that a judge cannot give is no part of a reward."""
    with pytest.raises(GymRewardError, match=r"reward_components\['judge'\]"):
        judged(reward=1.0, reward_components={"judge": value})


@pytest.mark.parametrize("components", [[1.0], "x", 1.0, False])
def test_components_that_are_no_object_are_refused(components: Any) -> None:
    with pytest.raises(GymRewardError, match="reward_components is a"):
        judged(reward=1.0, reward_components=components)


def test_components_without_a_reward_are_a_contradiction() -> None:
    with pytest.raises(GymRewardError, match="null"):
        judged(reward=None, reward_components={"a": 1.0})


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("judge_failed", FailureKind.INFRA),
        ("session_lost", FailureKind.INFRA),
        ("provider_oom_killed", FailureKind.INFRA),
        ("transport_timeout", FailureKind.INFRA),
        ("my_server:sandbox_timeout", FailureKind.INFRA),
        ("infrastructure", FailureKind.INFRA),
        ("my_server:classroom_full", FailureKind.DATA),
        ("verifier_error", FailureKind.DATA),
        ("judge_unparseable", FailureKind.DATA),
        ("my_server:something", FailureKind.DATA),
        (None, FailureKind.DATA),
    ],
)
def test_c11_a_sample_that_gym_masks_is_never_a_reward_of_zero(
    failure: str | None, kind: FailureKind
) -> None:
    """C11: a judge that is down answers with reward 0 and ``mask_sample``."""
    with pytest.raises(GymInvalidSample) as caught:
        judged(reward=0.0, mask_sample=True, failure_kind=failure, failure_reason="connect failed")
    assert kind_of(caught.value) is kind
    assert "connect failed" in str(caught.value)
    assert caught.value.failure_kind == (failure or "")


def test_c11_older_marks_of_the_same_are_honoured() -> None:
    """C11: releases that write the mark elsewhere."""
    with pytest.raises(GymInvalidSample):
        judged(reward=0.0, instance_config={"mask_sample": True})
    with pytest.raises(GymInvalidSample, match="no judge") as caught:
        judged(reward=0.0, _ng_failure_class="judge_failed", _ng_failure_judge_error="no judge")
    assert kind_of(caught.value) is FailureKind.INFRA


def test_a_failure_that_does_not_mask_the_sample_is_no_failure() -> None:
    made = judged(
        reward=0.5, mask_sample=False, failure_kind="verifier_error", instance_config={"mask_sample": False}
    )
    assert made.reward == 0.5


@pytest.mark.parametrize("mask", ["true", 1, [], 0.0])
def test_a_mask_that_is_no_boolean_is_refused(mask: Any) -> None:
    with pytest.raises(GymAnswerError, match="mask_sample"):
        judged(reward=0.0, mask_sample=mask)
