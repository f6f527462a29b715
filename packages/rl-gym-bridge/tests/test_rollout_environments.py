"""In-process rollouts: what verifiers and tools see, and what their faults do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.local import (
    LocalEnvironment,
    RolloutResponse,
    Tool,
    ToolError,
    Verdict,
    run_local_rollouts,
)
from rl_gym_bridge.testing import ScriptedChatModel, in_turns
from rl_gym_bridge.tool_calls import render_tool_call
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory


def row(question: str = "q", *, row_id: str = "r", agent: str = "e", **fields: Any) -> GymRow:
    return GymRow({"input": question}, {"name": agent}, fields, row_id)


def environment(verify: Callable[..., Any] = lambda row, response: 1.0, **settings: Any) -> LocalEnvironment:
    return LocalEnvironment("e", verify, **settings)


def echo_tool(function: Callable[..., Any] = lambda text: text) -> Tool:
    return Tool("echo", "Says it again.", {"type": "object"}, function)


def with_tool(function: Callable[..., Any] = lambda text: text, max_turns: int = 3, **settings: Any) -> Any:
    return environment(tools=(echo_tool(function),), max_turns=max_turns, **settings)


def run(
    rows: Sequence[GymRow], local: LocalEnvironment, model: Any, **changes: Any
) -> list[Trajectory | RolloutFailure]:
    settings: dict[str, Any] = {"group_size": 1, "step": 0, "seed": 0, "max_new_tokens": 200}
    settings.update(changes)
    return run_local_rollouts(rows, {local.name: local}, model, **settings)


def run_one(local: LocalEnvironment, model: Any, **changes: Any) -> Any:
    (outcome,) = run([row()], local, model, **changes)
    return outcome


CALL = render_tool_call("echo", {"text": "hi"})


def test_the_verifier_sees_row_final_text_conversation_and_stop_reason() -> None:
    seen: list[tuple[GymRow, RolloutResponse]] = []

    def verify(row: GymRow, response: RolloutResponse) -> float:
        seen.append((row, response))
        return 0.25

    outcome = run_one(with_tool(verify=verify), ScriptedChatModel(in_turns(CALL, "done")))
    ((judged, response),) = seen
    assert judged == row()
    assert (response.text, response.stop_reason) == ("done", StopReason.STOP)
    assert [m["role"] for m in response.messages] == ["user", "assistant", "tool", "assistant"]
    assert outcome.reward == 0.25
    assert outcome.text == "done"


def test_a_verdict_carries_components_and_metrics_beside_those_of_the_bridge() -> None:
    verdict = Verdict(0.5, components={"right": 1.0, "short": -0.5}, metrics={"thinks": 1})
    outcome = run_one(environment(lambda row, response: verdict), ScriptedChatModel(in_turns("x")))
    assert outcome.reward == 0.5
    assert outcome.reward_components == {"right": 1.0, "short": -0.5}
    assert outcome.metrics == {
        "turns": 1.0,
        "tool_calls": 0.0,
        "tool_errors": 0.0,
        "truncated": 0.0,
        "thinks": 1.0,
    }


@pytest.mark.parametrize("value", [None, Verdict(None)])
def test_no_reward_is_no_reward(value: Any) -> None:
    outcome = run_one(environment(lambda row, response: value), ScriptedChatModel(in_turns("x")))
    assert isinstance(outcome, Trajectory)
    assert outcome.reward is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1", "not a number"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (Verdict(1.0, metrics={"m": float("nan")}), "'m'"),
        (Verdict(1.0, components={"c": "x"}), "'c'"),  # type: ignore[dict-item]
        (Verdict(1.0, metrics={"turns": 1.0}), "'turns'"),
        (Verdict(1.0, metrics={"truncated": 1.0}), "'truncated'"),
        (Verdict(1.0, metrics={"reward/environment": 1.0}), "'reward/environment'"),
        (True, "True, not a number"),
        (Verdict(1.0, components={"c": True}), "'c'"),  # type: ignore[dict-item]
        (1e9, "within ±1e"),
        (Verdict(1.0, components={"c": 1e9, "d": 1 - 1e9}), "within ±1e"),
        (Verdict(1.0, components={"a": 0.2, "b": 0.1}), "components sum to 0.3"),
        (Verdict(None, components={"a": 0.2}), "the reward is null"),
    ],
)
def test_a_verdict_that_is_no_number_is_a_data_failure(value: Any, problem: str) -> None:
    outcome = run_one(environment(lambda row, response: value), ScriptedChatModel(in_turns("x")))
    assert isinstance(outcome, RolloutFailure)
    assert outcome.kind is FailureKind.DATA
    assert problem in outcome.error


def test_c11_a_verifier_that_raises_fails_its_rollout_and_leaves_the_siblings_their_rewards() -> None:
    answers = iter(["1", "2", "3", "4"])

    def verify(row: GymRow, response: RolloutResponse) -> float:
        if response.text == "3":
            raise KeyError("answer")
        return float(response.text)

    outcomes = run(
        [row()], environment(verify), ScriptedChatModel(lambda request: next(answers)), group_size=4
    )
    assert [getattr(outcome, "reward", "failed") for outcome in outcomes] == [1.0, 2.0, "failed", 4.0]
    failure = outcomes[2]
    assert isinstance(failure, RolloutFailure)
    assert (failure.kind, failure.agent, failure.rollout_id) == (FailureKind.DATA, "e", "train/0/0/2")
    assert "verify: KeyError: 'answer'" in failure.error
    assert "'r'" in failure.error


def test_a_verifier_that_changes_its_row_does_not_change_it_for_the_siblings() -> None:
    def verify(row: GymRow, response: RolloutResponse) -> float:
        return row.verifier["nested"].pop()  # type: ignore[no-any-return]

    source = row(nested=[1.0, 2.0])
    outcomes = run([source], environment(verify), ScriptedChatModel(in_turns("x")), group_size=3)
    assert [getattr(outcome, "reward", None) for outcome in outcomes] == [2.0, 2.0, 2.0]
    assert source.verifier == {"nested": [1.0, 2.0]}


def test_numbers_of_other_libraries_are_rewards() -> None:
    verdict = Verdict(Fraction(1, 2), components={"c": Fraction(1, 2)})  # type: ignore[arg-type, dict-item]
    outcome = run_one(environment(lambda row, response: verdict), ScriptedChatModel(in_turns("x")))
    assert (outcome.reward, outcome.reward_components) == (0.5, {"c": 0.5})
    assert type(outcome.reward) is float


@pytest.mark.parametrize(
    ("text", "invalid", "malformed"),
    [
        ("yes", False, False),
        ("<think>hm</think>yes", False, False),
        ("<think>hm", False, True),
        ("hm</think>yes", False, True),
        ("</think></think>x<think>", False, True),
        ("<think><think>hm</think>yes", False, True),
        ("<tool_call>{}", True, False),
        (CALL, True, False),
        (f"<think>{CALL}</think>yes", True, False),
    ],
)
def test_faults_of_form_are_flagged_as_through_gym(text: str, invalid: bool, malformed: bool) -> None:
    (turn,) = run_one(environment(), ScriptedChatModel(in_turns(text))).turns
    assert (turn.invalid_tool_call, turn.malformed_thinking) == (invalid, malformed)


def test_a_call_that_is_made_is_no_fault_of_form_and_one_that_cannot_be_read_is() -> None:
    broken = f"{CALL}<tool_call>{{</tool_call>"
    outcome = run_one(with_tool(), ScriptedChatModel(in_turns(CALL + CALL, broken, "done")))
    assert [turn.invalid_tool_call for turn in outcome.turns] == [False, True, False]
    assert not any(turn.malformed_thinking for turn in outcome.turns)


def test_truncation_is_a_metric() -> None:
    outcome = run_one(environment(), ScriptedChatModel(in_turns("much too long")), max_new_tokens=3)
    assert (outcome.stop_reason, outcome.metrics["truncated"]) == (StopReason.LENGTH, 1.0)
    limited = run_one(with_tool(max_turns=2), ScriptedChatModel(in_turns(CALL)))
    assert (limited.stop_reason, limited.metrics["truncated"]) == (StopReason.TOOL_LIMIT, 1.0)


def test_a_tools_answer_is_shown_and_its_calls_are_counted() -> None:
    two = CALL + render_tool_call("echo", {"text": "there"})
    model = ScriptedChatModel(in_turns(two, "done"))
    outcome = run_one(with_tool(), model)
    assert [m["content"] for m in model.calls[1][0].new_messages] == ["hi", "there"]
    assert outcome.metrics == {"turns": 2.0, "tool_calls": 2.0, "tool_errors": 0.0, "truncated": 0.0}


def _refuse(text: str) -> str:
    raise ToolError("not today")


@pytest.mark.parametrize(
    ("answer", "function", "told"),
    [
        ("<tool_call>\n{\n</tool_call>", str, "not valid JSON"),
        ("<tool_call>\n{", str, "no </tool_call>"),
        (render_tool_call("ecco", {}), str, "no tool 'ecco'; the tools are: echo"),
        (render_tool_call("echo", {"wrong": 1}), lambda text: text, "wrong arguments for echo"),
        (CALL, _refuse, "not today"),
        (render_tool_call("x" * 5000, {}), str, "…"),
    ],
)
def test_what_the_policy_does_wrong_is_told_to_it_and_counted(
    answer: str, function: Callable[..., str], told: str
) -> None:
    model = ScriptedChatModel(in_turns(answer, "done"))
    outcome = run_one(with_tool(function), model, max_new_tokens=9000)
    (message,) = model.calls[1][0].new_messages
    assert message["role"] == "tool"
    assert message["content"].startswith("Error: ")
    assert told in message["content"]
    assert len(message["content"]) < 300
    assert isinstance(outcome, Trajectory)
    assert (outcome.metrics["tool_calls"], outcome.metrics["tool_errors"]) == (1, 1)


@pytest.mark.parametrize("fault", [lambda text: 1 / 0, lambda text: 3], ids=["raises", "returns no text"])
def test_a_fault_in_a_tools_code_fails_that_rollout_only(fault: Callable[..., Any]) -> None:
    answers = iter([CALL, "fine"])
    outcomes = run([row()], with_tool(fault), ScriptedChatModel(lambda request: next(answers)), group_size=2)
    failure, other = outcomes
    assert isinstance(failure, RolloutFailure)
    assert (failure.kind, isinstance(other, Trajectory)) == (FailureKind.DATA, True)
    assert "tool 'echo'" in failure.error


def test_half_characters_in_a_tools_answer_reach_no_tokenizer() -> None:
    model = ScriptedChatModel(in_turns(CALL, "done"))
    assert isinstance(run_one(with_tool(lambda text: "a\ud800b"), model), Trajectory)
    assert model.calls[1][0].new_messages[0]["content"] == "a\\ud800b"


def test_tools_are_offered_to_the_model_and_a_row_may_narrow_them() -> None:
    other = Tool("other", "", {}, lambda: "x")
    local = environment(tools=(echo_tool(), other), max_turns=2)
    narrowed = GymRow(
        {"input": "q", "tools": [{"type": "function", "name": "other"}]}, {"name": "e"}, {}, "n"
    )
    model = ScriptedChatModel(in_turns("done"))
    run([row(), narrowed], local, model)
    offered = [[tool["function"]["name"] for tool in request.tools] for request in model.calls[0]]
    assert offered == [["echo", "other"], ["other"]]


def test_a_row_that_wants_a_tool_which_is_not_there_is_a_data_failure() -> None:
    wants = GymRow({"input": "q", "tools": [{"name": "search"}]}, {"name": "e"}, {}, "w")
    model = ScriptedChatModel(in_turns("x"))
    (failure,) = run([wants], with_tool(), model)
    assert isinstance(failure, RolloutFailure)
    assert "'search'" in failure.error
    assert model.calls == []
