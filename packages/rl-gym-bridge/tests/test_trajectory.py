from __future__ import annotations

import pickle

import pytest

from rl_gym_bridge.trajectory import StopReason, Trajectory, TrajectoryError, Turn


def trajectory(*turns: Turn, **changes: object) -> Trajectory:
    settings: dict[str, object] = {
        "turns": turns,
        "reward": 1.0,
        "stop_reason": StopReason.STOP,
        "group_id": "g",
        "rollout_id": "g/0",
    }
    settings.update(changes)
    return Trajectory(**settings)  # type: ignore[arg-type]


FIRST = Turn((1, 2), (3,), (-0.5,))
SECOND = Turn((4,), (5, 6), (-0.25, -0.125))


def test_ids_mask_and_logprobs_are_aligned_over_turns() -> None:
    both = trajectory(FIRST, SECOND)
    assert both.token_ids == (1, 2, 3, 4, 5, 6)
    assert both.token_mask == (0, 0, 1, 0, 1, 1)
    assert both.logprobs == (0.0, 0.0, -0.5, 0.0, -0.25, -0.125)
    assert both.sampled_tokens == 3
    assert pickle.loads(pickle.dumps(both)) == both


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [((1,), ()), ((), (-0.1,)), ((1,), (0.1,)), ((1,), (float("nan"),)), ((1,), (float("-inf"),))],
)
def test_turns_that_contradict_themselves_are_refused(
    ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> None:
    with pytest.raises(TrajectoryError):
        Turn((), ids, logprobs)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.1])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_bad_log_probability_is_found_wherever_it_stands(index: int, value: float) -> None:
    logprobs = [-0.5, -0.25, 0.00005]
    Turn((), (1, 2, 3), tuple(logprobs))
    logprobs[index] = value
    with pytest.raises(TrajectoryError, match=f"token {index} has"):
        Turn((), (1, 2, 3), tuple(logprobs))


@pytest.mark.parametrize(
    "changes",
    [{"turns": ()}, {"reward": float("nan")}, {"weight_versions": (1, 2)}],
    ids=lambda c: next(iter(c)),
)
def test_trajectories_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(TrajectoryError, match="g/0"):
        trajectory(FIRST, **changes)


def test_truncation_is_a_property_of_the_stop_reason() -> None:
    truncated = {reason.value for reason in StopReason if reason.truncated}
    assert truncated == {"length", "tool_limit", "aborted"}


def test_forks_belong_to_their_rollout_and_do_not_fork() -> None:
    fork = trajectory(SECOND, reward=None)
    both = trajectory(FIRST, forks=(fork,))
    assert (both.token_ids, both.forks) == ((1, 2, 3), (fork,)), (
        "a fork is no part of its rollout's own sequence"
    )
    assert pickle.loads(pickle.dumps(both)) == both
    for stranger in (trajectory(SECOND, rollout_id="g/1"), trajectory(SECOND, group_id="h"), both):
        with pytest.raises(TrajectoryError, match="forks carry the ids of their rollout"):
            trajectory(FIRST, forks=(stranger,))
