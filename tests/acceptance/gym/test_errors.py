"""What goes wrong behind Gym becomes a failure that says so, never a sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rl_gym_bridge.requests import RolloutResult
from rl_gym_bridge.session import GymSession
from rl_gym_bridge.testing import CallKind, ScriptedTurn, gym_cases
from rl_gym_bridge.testing.gym_run import GymRun
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory

CASES = {case.name: case for case in gym_cases()}
ANSWER = ScriptedTurn(content="\\boxed{E}")
DEADLINE_S = 4.0
Rows = dict[str, dict[str, Any]]


@pytest.fixture
def impatient(gym: GymRun) -> Iterator[GymSession]:
    """Another session with the same Gym that gives a rollout a few seconds."""
    with GymSession(gym.config(rollout_timeout_s=DEADLINE_S), head_url=gym.session.head_url) as session:
        yield session
    # Gym goes on with a rollout that nobody waits for: its model has to let it end.
    for script in ENDLESS:
        gym.server.script(script, (ANSWER,))


def run(gym: GymRun, rows: Rows, name: str, *turns: ScriptedTurn) -> RolloutResult:
    gym.server.script(name, turns)
    (result,) = gym.run(gym.requests_for(rows[name], script=name, agent=CASES[name].agent))
    return result


def failure_of(result: RolloutResult) -> RolloutFailure:
    assert isinstance(result.outcome, RolloutFailure), result.outcome
    return result.outcome


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501])
def test_an_error_of_the_model_is_a_failure(gym: GymRun, rows: Rows, status: int) -> None:
    """The status 500 of the agent quotes the model; a request that it refuses is the row's fault."""
    failure = failure_of(run(gym, rows, "mcqa/accepted", ScriptedTurn(status=status)))
    assert failure.kind is (FailureKind.DATA if status < 500 else FailureKind.INFRA)
    assert failure.error.startswith("GymHttpError: mcqa_simple_agent at http://127.0.0.1:")
    assert "answered 500" in failure.error
    assert failure.agent == "mcqa_simple_agent"
    # Gym itself asks again after a 500, a few times.
    assert len(gym.server.calls) == (3 if status == 500 else 1)


@pytest.mark.parametrize("body", ['{"choices": [', "<html>busy</html>", "{}", '{"choices": []}'])
def test_an_answer_of_the_model_that_is_none_is_a_failure(gym: GymRun, rows: Rows, body: str) -> None:
    failure = failure_of(run(gym, rows, "mcqa/accepted", ScriptedTurn(body=body)))
    assert failure.kind is FailureKind.INFRA


@pytest.mark.parametrize("name", ["equivalence_llm_judge/accepted", "math_with_judge/rejected"])
def test_c11_a_judge_that_is_down_is_a_failure_and_no_reward(gym: GymRun, rows: Rows, name: str) -> None:
    gym.server.judge = lambda request: ScriptedTurn(status=500)
    failure = failure_of(run(gym, rows, name, *CASES[name].turns))
    assert failure.kind is FailureKind.INFRA
    assert len(gym.server.calls_of(CallKind.POLICY)) == 1
    assert len(gym.server.calls_of(CallKind.JUDGE)) >= 1


def test_c11_one_failure_leaves_its_siblings_alone(gym: GymRun, rows: Rows) -> None:
    case = CASES["mcqa/accepted"]
    requests = []
    for index in range(4):
        turn = ScriptedTurn(status=500) if index == 2 else case.turns[0]
        gym.server.script(f"sibling {index}", (turn,))
        requests += gym.requests_for(rows[case.name], script=f"sibling {index}", agent=case.agent)
    outcomes = {result.request.rollout_id: result.outcome for result in gym.run(requests)}
    kinds = [type(outcomes[request.rollout_id]).__name__ for request in requests]
    assert kinds == ["Trajectory", "Trajectory", "RolloutFailure", "Trajectory"]


def test_a_first_prompt_that_fills_the_context_is_the_rows_fault(gym: GymRun, rows: Rows) -> None:
    gym.server.context_length = 100
    failure = failure_of(run(gym, rows, "mcqa/accepted", ANSWER))
    assert failure.kind is FailureKind.DATA
    assert failure.error.startswith("GymNoTokensError: ")
    assert "context" in failure.error


def test_a9_a_later_prompt_that_fills_the_context_ends_the_rollout_by_length(gym: GymRun, rows: Rows) -> None:
    name = "workplace_assistant/accepted"
    whole = run(gym, rows, name, *CASES[name].turns)
    assert isinstance(whole.outcome, Trajectory)
    first, second, _ = gym.server.calls_of(CallKind.POLICY)
    limit = first.body["max_tokens"]
    gym.server.context_length = len(second.prompt_token_ids) + limit - 1
    cut = run(gym, rows, name, *CASES[name].turns)
    assert isinstance(cut.outcome, Trajectory), cut.outcome
    assert cut.outcome.stop_reason is StopReason.LENGTH
    assert len(cut.outcome.turns) == 1
    assert cut.outcome.turns == whole.outcome.turns[:1]


def test_an_answer_that_is_cut_is_truncated_by_what_the_engine_says(gym: GymRun, rows: Rows) -> None:
    result = run(gym, rows, "mcqa/accepted", ScriptedTurn(content="x" * 5000))
    assert isinstance(result.outcome, Trajectory)
    assert result.outcome.stop_reason is StopReason.LENGTH
    assert sum(result.outcome.token_mask) == 3000


def test_ids_without_log_probabilities_are_a_failure(gym: GymRun, rows: Rows) -> None:
    """Gym 0.4 passes them on with status 200."""

    def lose_one(call: Any, document: dict[str, Any]) -> dict[str, Any]:
        document["choices"][0]["message"]["generation_log_probs"].pop()
        return document

    gym.server.alter = lose_one
    failure = failure_of(run(gym, rows, "mcqa/accepted", ANSWER))
    assert failure.kind is FailureKind.DATA
    assert failure.error.startswith("GymTokenError: ")
    assert "generation_log_probs" in failure.error


def test_b5_a_prompt_that_does_not_extend_the_tokens_is_a_failure_naming_turn_and_index(
    gym: GymRun, rows: Rows
) -> None:
    def swap_one(call: Any, document: dict[str, Any]) -> dict[str, Any]:
        if call.turn == 1:
            document["choices"][0]["message"]["prompt_token_ids"][7] ^= 1
        return document

    gym.server.alter = swap_one
    name = "workplace_assistant/accepted"
    failure = failure_of(run(gym, rows, name, *CASES[name].turns))
    assert failure.kind is FailureKind.DATA
    assert failure.error.startswith("GymContinuityError: ")
    assert "turn 2" in failure.error
    assert "index 7" in failure.error


def test_a_connection_that_is_cut_once_is_taken_up_again(gym: GymRun, rows: Rows) -> None:
    cut = ScriptedTurn(content="\\boxed{E}", drop_connection=True, faulty_calls=1)
    result = run(gym, rows, "mcqa/accepted", cut)
    assert isinstance(result.outcome, Trajectory), result.outcome
    assert [call.status for call in gym.server.calls] == [0, 200]


ENDLESS = {
    "429": ScriptedTurn(status=429),
    "502": ScriptedTurn(status=502),
    "503": ScriptedTurn(status=503),
    "cut connections": ScriptedTurn(drop_connection=True),
    "thoughts without an answer": ScriptedTurn(reasoning_content="Hm."),
    "an answer that does not come": ScriptedTurn(content="late", delay_s=DEADLINE_S + 2),
    "a server that is not there": ANSWER,
}


def timed_out(gym: GymRun, rows: Rows, session: GymSession, faults: Sequence[str]) -> None:
    """Every one of these ends in our deadline, and at the same time."""
    case = CASES["mcqa/accepted"]
    requests = []
    for fault in faults:
        gym.server.script(fault, (ENDLESS[fault],))
        requests += gym.requests_for(rows[case.name], script=fault, agent=case.agent)
    began = time.monotonic()
    results = gym.run(requests, session=session)
    assert DEADLINE_S <= time.monotonic() - began < DEADLINE_S + 3
    assert len(results) == len(faults)
    for failure in map(failure_of, results):
        assert failure.kind is FailureKind.INFRA
        assert failure.error.startswith("GymTimeout: ")


def test_our_deadline_ends_what_gym_repeats_for_ever(gym: GymRun, rows: Rows, impatient: GymSession) -> None:
    faults = [fault for fault in ENDLESS if fault != "a server that is not there"]
    timed_out(gym, rows, impatient, faults)
    for fault in faults:
        assert gym.server.calls_of(CallKind.POLICY, fault) or fault == "an answer that does not come"


def test_a_dead_model_server_is_a_failure_and_its_return_is_enough(
    gym: GymRun, rows: Rows, impatient: GymSession
) -> None:
    gym.server.stop()
    timed_out(gym, rows, impatient, ["a server that is not there"])
    gym.server.start()
    result = run(gym, rows, "mcqa/accepted", ANSWER)
    assert isinstance(result.outcome, Trajectory), result.outcome
    assert result.outcome.reward == 1.0
