"""Streams of rollout groups: complete groups, results that do not add up, deadlines, and leaving early."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from rl_gym_bridge.answers.outcomes import OutcomeMaker
from rl_gym_bridge.client import Answer
from rl_gym_bridge.config import EffortLevel, NemoGymConfig, RewardPenalties
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.errors import DatasetError
from rl_gym_bridge.failures import GymServerDied, GymTimeout, RolloutCountError, kind_of
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.rollout_groups import RolloutGroup
from rl_gym_bridge.rollouts import collect_rollouts, run_nemo_gym_rollout_sync, stream_nemo_gym_rollouts
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

ROWS = [
    GymRow.from_mapping(
        {"responses_create_params": {"input": f"q{index}"}, "agent_ref": {"name": "a"}, "row_id": f"r{index}"}
    )
    for index in range(4)
]


def sample(request: RolloutRequest, reward: float = 1.0, **turn: Any) -> RolloutResult:
    turns = (Turn((1,), (2, 3), (-0.5, -0.5), **turn),)
    return RolloutResult(
        request,
        Trajectory(turns, reward, StopReason.STOP, request.group_id, request.rollout_id, request.agent),
    )


def failure(request: RolloutRequest, kind: FailureKind = FailureKind.INFRA) -> RolloutResult:
    return RolloutResult(
        request, RolloutFailure(request.group_id, request.rollout_id, request.agent, kind, "HTTP 500")
    )


class Runner:
    """Answers as ``script`` says: what it makes of the requests, in its order. Results cross a process."""

    def __init__(self, script: Callable[[Sequence[RolloutRequest]], Sequence[Any]]) -> None:
        self.script = script
        self.asked: list[RolloutRequest] = []
        self.given = 0
        self.closed = False

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        self.asked += requests
        try:
            for result in self.script(requests):
                await asyncio.sleep(0)
                if isinstance(result, BaseException):
                    raise result
                self.given += 1
                yield pickle.loads(pickle.dumps(result))
        finally:
            self.closed = True


class HangingRunner(Runner):
    """Gives what the script says and then nothing more; ``stubborn`` ones do not even stop when told to."""

    def __init__(
        self, script: Callable[[Sequence[RolloutRequest]], Sequence[Any]], *, stubborn: bool = False
    ) -> None:
        super().__init__(script)
        self.stubborn = stubborn
        self.released = False

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        async with aclosing(super().run_rollouts(requests)) as results:  # type: ignore[type-var]
            async for result in results:
                yield result
        end = time.monotonic() + 20.0
        while time.monotonic() < end and not self.released:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "group_size": 2,
        "step": 1,
        "seed": 0,
        "generation": GenerationOverrides(temperature=1.0),
        "timeout_s": 20.0,
        **changes,
    }


def all_good(requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
    return [sample(request) for request in requests]


def run(
    script: Callable[[Sequence[RolloutRequest]], Sequence[Any]], rows: Sequence[GymRow] = ROWS, **changes: Any
) -> Any:
    return run_nemo_gym_rollout_sync(Runner(script), rows, **settings(**changes))


async def groups_of(runner: Runner, **changes: Any) -> list[RolloutGroup]:
    return [group async for group in stream_nemo_gym_rollouts(runner, ROWS, **settings(**changes))]


def test_groups_come_when_their_last_rollout_has_ended() -> None:
    runner = Runner(
        lambda requests: [
            sample(r) for r in (*requests[4:], requests[0], requests[3], requests[1], requests[2])
        ]
    )
    groups = asyncio.run(groups_of(runner))
    assert [group.position for group in groups] == [2, 3, 0, 1]
    for group in groups:
        assert group.row is ROWS[group.position]
        assert [result.request.rollout_id for result in group.results] == [
            f"train/1/{group.position}/0",
            f"train/1/{group.position}/1",
        ]
        assert [outcome.rollout_id for outcome in group.outcomes] == [
            result.request.rollout_id for result in group.results
        ]
    assert runner.closed


def test_a_group_is_handed_over_before_others_have_ended() -> None:
    async def scenario() -> None:
        runner = Runner(all_good)
        async with aclosing(stream_nemo_gym_rollouts(runner, ROWS, **settings())) as stream:
            assert (await anext(stream)).position == 0
            assert runner.given == 2

    asyncio.run(scenario())


def test_a_batch_has_its_groups_in_the_order_of_the_rows() -> None:
    batch = run(lambda requests: [sample(r) for r in reversed(requests)])
    assert [group.position for group in batch.groups] == [0, 1, 2, 3]
    assert [outcome.rollout_id for outcome in batch.outcomes] == [
        f"train/1/{row}/{index}" for row in range(4) for index in range(2)
    ]
    assert batch.metrics["a/rollouts"] == 8.0
    assert batch.metrics["a/coverage/completed"] == 8.0
    assert batch.coverage.never_completed == ()


def test_one_row_may_appear_twice() -> None:
    batch = run(all_good, [ROWS[0], ROWS[0]])
    assert [group.group_id for group in batch.groups] == ["train/1/0", "train/1/1"]
    assert batch.coverage.tasks["r0"].expected == 4


def test_no_row_is_no_work() -> None:
    runner = Runner(all_good)
    batch = run_nemo_gym_rollout_sync(runner, [], **settings())
    assert (batch.groups, runner.asked) == ((), [])


def test_c11_k5_a_failed_sibling_is_a_record_in_its_place_and_never_a_reward() -> None:
    """C11, K5: the verifier answers 500 for one of four siblings, other rows are not touched."""
    batch = run(
        lambda requests: [failure(r) if r.rollout_id.endswith("0/2") else sample(r) for r in requests],
        group_size=4,
    )
    first = batch.groups[0]
    assert len(first.trajectories) == 3
    assert [failed.rollout_id for failed in first.failures] == ["train/1/0/2"]
    assert isinstance(first.outcomes[2], RolloutFailure)
    assert [len(group.trajectories) for group in batch.groups[1:]] == [4, 4, 4]
    assert batch.metrics["a/reward_mean"] == 1.0
    assert (batch.metrics["a/samples"], batch.metrics["a/failures_infra"]) == (15.0, 1.0)


# --- results that do not add up


def test_k6_fewer_results_than_requests_name_what_is_missing() -> None:
    """K6: 8 asked, the stream ends after 5."""
    with pytest.raises(RolloutCountError, match="5 of 8") as caught:
        run(lambda requests: all_good(requests)[:5])
    assert caught.value.missing == ("train/1/2/1", "train/1/3/0", "train/1/3/1")
    for name in caught.value.missing:
        assert name in str(caught.value)


def test_k6_complete_groups_have_been_handed_over_before_the_error() -> None:
    async def scenario() -> list[int]:
        seen: list[int] = []
        try:
            async for group in stream_nemo_gym_rollouts(
                Runner(lambda r: all_good(r)[:5]), ROWS, **settings()
            ):
                seen.append(group.position)
        except RolloutCountError:
            return seen
        raise AssertionError("the stream ended as if nothing were missing")

    assert asyncio.run(scenario()) == [0, 1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda rs: [None, *all_good(rs)], "NoneType instead of a result"),
        (lambda rs: [*all_good(rs[:3]), *all_good(rs[:3])], "two results for 'train/1/0/0'"),
        (lambda rs: [*all_good(rs), sample(rs[0])], "two results for 'train/1/0/0'"),
        (
            lambda rs: [sample(replace(rs[0], rollout_id="train/1/9/0"))],
            "'train/1/9/0', which was not asked for",
        ),
        (lambda rs: [sample(replace(rs[0], group_id="train/1/1"))], "its group is 'train/1/1'"),
        (lambda rs: [sample(replace(rs[0], agent="b"))], "its agent is 'b'"),
        (lambda rs: [replace(sample(replace(rs[0], agent="b")), request=rs[0])], "its agent is 'b'"),
        (lambda rs: [sample(replace(rs[0], row_id="r3"))], "its row is 'r3'"),
        (lambda rs: [replace(sample(rs[1]), request=rs[0])], "its rollout is 'train/1/0/1'"),
        (lambda rs: [replace(sample(rs[2]), request=rs[0])], "its group is 'train/1/1'"),
        (lambda rs: [replace(failure(rs[1]), request=rs[0])], "its rollout is 'train/1/0/1'"),
        (lambda rs: [replace(sample(rs[0]), outcome=None)], "holds a NoneType"),  # type: ignore[arg-type]
    ],
)
def test_results_that_are_double_unknown_or_mixed_up_are_refused(script: Any, words: str) -> None:
    with pytest.raises(RolloutCountError, match=words):
        run(script)


def test_the_runners_own_error_comes_through_as_it_is() -> None:
    died = GymServerDied("the process is gone", component="mcqa")
    runner = Runner(lambda requests: [sample(requests[0]), died])
    with pytest.raises(GymServerDied) as caught:
        asyncio.run(groups_of(runner))
    assert caught.value is died
    assert runner.closed


# --- time


def test_a_runner_that_hangs_ends_at_the_deadline_and_what_is_missing_is_named() -> None:
    runner = HangingRunner(lambda requests: all_good(requests)[:7])
    started = time.monotonic()
    with pytest.raises(GymTimeout, match=r"bound is 0\.2 s.*7 of 8 rollouts; missing: train/1/3/1") as caught:
        asyncio.run(groups_of(runner, timeout_s=0.2))
    assert time.monotonic() - started < 5.0
    assert runner.closed
    assert kind_of(caught.value) is FailureKind.INFRA


def test_a_runner_that_gives_nothing_for_too_long_ends_before_the_deadline() -> None:
    with pytest.raises(GymTimeout, match=r"no result for 0\.2 s.*1 of 8"):
        asyncio.run(groups_of(HangingRunner(lambda requests: all_good(requests)[:1]), stall_timeout_s=0.2))


def test_the_time_that_the_reader_takes_is_no_stall() -> None:
    async def scenario() -> int:
        count = 0
        async for _ in stream_nemo_gym_rollouts(Runner(all_good), ROWS, **settings(stall_timeout_s=0.3)):
            count += 1
            await asyncio.sleep(0.35)
        return count

    assert asyncio.run(scenario()) == 4


def test_a_steady_stream_is_no_stall_however_long_it_takes() -> None:
    class Steady(Runner):
        async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
            for request in requests:
                await asyncio.sleep(0.15)
                yield sample(request)

    # The eight of them take longer than one alone may.
    assert len(asyncio.run(groups_of(Steady(all_good), stall_timeout_s=1.0))) == 4


def test_a_runner_that_ignores_its_cancellation_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_gym_bridge.rollouts._CLOSE_S", 0.1)
    elapsed: list[float] = []

    async def scenario() -> None:
        runner = HangingRunner(lambda requests: [], stubborn=True)
        started = time.monotonic()
        with pytest.raises(GymTimeout):
            await groups_of(runner, timeout_s=0.1)
        elapsed.append(time.monotonic() - started)
        runner.released = True
        await asyncio.sleep(0.2)

    asyncio.run(scenario())
    assert elapsed[0] < 5.0


def test_a_runner_that_does_not_end_after_its_last_result_takes_nothing_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl_gym_bridge.rollouts._CLOSE_S", 0.1)
    started = time.monotonic()
    groups = asyncio.run(groups_of(HangingRunner(all_good)))
    assert len(groups) == 4
    assert time.monotonic() - started < 5.0


def test_leaving_the_stream_early_closes_the_runners() -> None:
    async def scenario() -> Runner:
        runner = Runner(all_good)
        async with aclosing(stream_nemo_gym_rollouts(runner, ROWS, **settings())) as stream:
            async for _ in stream:
                break
        assert runner.closed
        return runner

    assert asyncio.run(scenario()).given < 8


def test_cancelling_the_reader_closes_the_runners() -> None:
    async def scenario() -> Runner:
        runner = HangingRunner(lambda requests: all_good(requests)[:3])
        task = asyncio.ensure_future(collect_rollouts(stream_nemo_gym_rollouts(runner, ROWS, **settings())))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return runner

    assert asyncio.run(scenario()).closed


def test_the_synchronous_call_refuses_a_running_loop() -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="collect_rollouts"):
            run(all_good)

    asyncio.run(scenario())


# --- what goes in and what is taken away


def test_nothing_is_sent_before_every_row_is_checked() -> None:
    bad = GymRow.from_mapping(
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "/etc/passwd"}]}]
            },
            "agent_ref": {"name": "a"},
        }
    )
    runner = Runner(all_good)
    with pytest.raises(DatasetError):
        run_nemo_gym_rollout_sync(runner, [*ROWS, bad], **settings())
    assert runner.asked == []


class GymAnswers:
    """A runner as a session is one: answers of Gym, made into results by the session's own settings."""

    def __init__(self, answer: Callable[[RolloutRequest], dict[str, Any]], **config: Any) -> None:
        self.answer = answer
        self.outcomes = OutcomeMaker(NemoGymConfig(model_name="policy", **config))

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        for request in requests:
            await asyncio.sleep(0)
            yield self.outcomes.result(request, Answer(self.answer(request), 1, 0.0))


def gym_answer(text: str = "ok", **top: Any) -> dict[str, Any]:
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        "prompt_token_ids": [1],
        "generation_token_ids": [2, 3],
        "generation_log_probs": [-0.5, -0.5],
    }
    return {"response": {"output": [message]}, "reward": 1.0, **top}


LEVEL = EffortLevel("low", share=1.0, token_budget=1, token_penalty=0.25)


def test_penalties_and_the_levels_price_are_those_of_the_runners_configuration() -> None:
    runner = GymAnswers(
        lambda request: gym_answer("<tool_call>" if request.rollout_id.endswith("/1") else "ok"),
        penalties=RewardPenalties(invalid_tool_call=0.5),
        effort_levels=(LEVEL,),
    )
    batch = run_nemo_gym_rollout_sync(runner, ROWS, **settings(effort_levels=(LEVEL,)))
    assert [outcome.reward for outcome in batch.outcomes] == [0.75, 0.25] * 4  # type: ignore[union-attr]
    assert batch.metrics["a/reward_environment_mean"] == 1.0
    assert batch.metrics["a/effort/low/reward_mean"] == 0.5
    assert batch.metrics["a/component/penalty/tokens_mean"] == -0.25


def test_an_environment_that_names_a_number_like_the_bridges_pays_its_penalties_and_keeps_its_number() -> (
    None
):
    runner = GymAnswers(
        lambda _: gym_answer("<tool_call>", **{"reward/environment": 5.0}),
        penalties=RewardPenalties(invalid_tool_call=0.5),
    )
    batch = run_nemo_gym_rollout_sync(runner, ROWS, **settings())
    assert {outcome.reward for outcome in batch.outcomes} == {0.5}  # type: ignore[union-attr]
    assert batch.metrics["a/reward_environment_mean"] == 1.0
    assert batch.metrics["a/metric/verifier/reward/environment_mean"] == 5.0


def test_a_level_that_only_the_stream_knows_is_a_failure_and_not_a_free_one() -> None:
    runner = GymAnswers(lambda _: gym_answer())
    batch = run_nemo_gym_rollout_sync(runner, ROWS, **settings(effort_levels=(LEVEL,)))
    for outcome in batch.outcomes:
        assert isinstance(outcome, RolloutFailure)
        assert "'low'" in outcome.error
        assert "same levels" in outcome.error


def test_penalties_can_be_given_in_one_place_only() -> None:
    with pytest.raises(TypeError, match="penalties"):
        run(all_good, penalties=RewardPenalties(invalid_tool_call=0.5))


def test_a_component_that_clashes_with_a_penalty_fails_its_rollout_only() -> None:
    name = "penalty/invalid_tool_call"
    clash = {"reward_components": {name: 1.0}}
    runner = GymAnswers(
        lambda r: gym_answer("<tool_call>", **(clash if r.rollout_id == "train/1/0/0" else {})),
        penalties=RewardPenalties(invalid_tool_call=0.5),
    )
    batch = run_nemo_gym_rollout_sync(runner, ROWS, **settings())
    assert [isinstance(outcome, RolloutFailure) for outcome in batch.outcomes] == [True] + [False] * 7
