"""In-process rollouts: tokens, masks, continuity, and how a rollout ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rl_gym_bridge.chat import ChatReply, ChatRequest
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environments import get_environment
from rl_gym_bridge.local import (
    LocalEnvironment,
    Tool,
    run_local_rollouts,
)
from rl_gym_bridge.testing import ByteTokenizer, ScriptedChatModel, in_turns
from rl_gym_bridge.tool_calls import render_tool_call
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory

IM_END = ByteTokenizer.im_end_id


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


class TokenModel:
    """A model of bare tokens: turn ``t`` of every rollout is ``turns[t]``."""

    def __init__(self, *turns: ChatReply | Callable[[ChatRequest], Any]) -> None:
        self.turns = turns
        self.calls: list[tuple[ChatRequest, ...]] = []

    def chat(self, requests: Sequence[ChatRequest]) -> list[Any]:
        self.calls.append(tuple(requests))
        turn = self.turns[len(self.calls) - 1]
        return [turn(request) if callable(turn) else turn for request in requests]


def sampled(
    new: Sequence[int],
    ids: Sequence[int],
    text: str = "a",
    stop: StopReason = StopReason.STOP,
    version: int = 0,
) -> Callable[[ChatRequest], ChatReply]:
    """A reply that extends the request's prefix by ``new`` prompt tokens."""
    logprobs = tuple(-token / 8 for token in ids)
    return lambda request: ChatReply(
        (*request.prefix_token_ids, *new), tuple(ids), logprobs, text, stop, version
    )


CALL = render_tool_call("echo", {"text": "hi"})


def test_a3_a_system_prompt_added_by_the_environment_shifts_no_mask() -> None:
    model = ScriptedChatModel(in_turns("answer"))
    outcome = run_one(environment(system_prompt="Be brief."), model)
    tokenizer = model.tokenizer
    shown = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    assert list(outcome.token_ids) == [*tokenizer.chat_prompt(shown), *tokenizer.encode("answer"), IM_END]
    assert len(outcome.token_ids) == len(outcome.token_mask) == len(outcome.logprobs)
    assert sum(outcome.token_mask) == 7
    assert outcome.token_mask[-7:] == (1,) * 7


def test_a_system_prompt_does_not_replace_that_of_the_row() -> None:
    model = ScriptedChatModel(in_turns("answer"))
    own = GymRow(
        {"input": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "q"}]},
        {"name": "e"},
        {},
        "r",
    )
    run([own], environment(system_prompt="Be brief."), model)
    assert [m["content"] for m in model.calls[0][0].messages] == ["Mine.", "q"]


def test_a4_the_cap_is_per_turn_and_no_finished_turn_is_cut() -> None:
    model = TokenModel(
        sampled([100], range(1, 7), CALL),
        sampled([0] * 4, range(7, 13), CALL),
        sampled([0] * 4, range(13, 19)),
    )
    outcome = run_one(with_tool(), model, max_new_tokens=8)
    assert len(outcome.token_ids) - 1 == 26
    assert sum(outcome.token_mask) == 18
    assert [token for token, kept in zip(outcome.token_ids, outcome.token_mask, strict=True) if kept] == list(
        range(1, 19)
    )
    assert [request.max_new_tokens for call in model.calls for request in call] == [8, 8, 8]


def test_b3_what_the_template_puts_behind_an_answer_belongs_to_the_next_prompt() -> None:
    model = TokenModel(sampled([1], [5, 6, 2], CALL), sampled([9, 30, 31], [7, 2]))
    outcome = run_one(with_tool(), model)
    assert outcome.token_ids == (1, 5, 6, 2, 9, 30, 31, 7, 2)
    assert outcome.token_mask == (0, 1, 1, 1, 0, 0, 0, 1, 1)
    assert model.calls[1][0].prefix_token_ids == (1, 5, 6, 2)


def test_b4_the_history_holds_the_call_once_and_the_next_prompt_extends_it() -> None:
    model = ScriptedChatModel(in_turns(CALL, "done"))
    outcome = run_one(with_tool(), model)
    text = model.tokenizer.decode(outcome.token_ids)
    assert text.count("<tool_call>") == 1
    second = model.calls[1][0]
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[1]["content"] == CALL
    assert second.new_messages == ({"role": "tool", "name": "echo", "content": "hi"},)
    assert outcome.token_ids[: len(second.prefix_token_ids)] == second.prefix_token_ids


def test_b5_a_broken_prefix_is_a_data_failure_naming_turn_and_index() -> None:
    broken = ChatReply((1, 2, 3, 9, 5), (6,), (-0.1,), "a", StopReason.STOP, 0)
    outcome = run_one(with_tool(), TokenModel(sampled([1, 2], [3, 4], CALL), broken))
    assert isinstance(outcome, RolloutFailure)
    assert outcome.kind is FailureKind.DATA
    assert "turn 2" in outcome.error
    assert "index 3 got 9, want 4" in outcome.error


def test_b8_an_end_token_that_was_not_sampled_is_not_in_the_mask() -> None:
    cut_before_end = sampled([1], [5, 6], CALL)
    model = TokenModel(cut_before_end, sampled([2, 9], [7, 2]))
    outcome = run_one(with_tool(), model)
    assert outcome.token_ids == (1, 5, 6, 2, 9, 7, 2)
    assert outcome.token_mask == (0, 1, 1, 0, 0, 1, 1)
    assert outcome.logprobs[3:5] == (0.0, 0.0)


def test_b9_separators_of_several_tokens_leave_the_mask_sum_at_what_was_sampled() -> None:
    separator = [40, 41, 42, 43]
    model = TokenModel(sampled([1], [5, 40, 41], CALL), sampled(separator, [42, 43]))
    outcome = run_one(with_tool(), model)
    assert outcome.token_mask == (0, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    assert sum(outcome.token_mask) == outcome.sampled_tokens == 5


@pytest.mark.parametrize(
    ("ids", "stop"),
    [((5, 7), StopReason.STOP), ((5, 2), StopReason.LENGTH)],
    ids=["no eos, stop", "eos, length"],
)
def test_b10_the_stop_reason_is_the_engines_whatever_the_last_token_is(
    ids: tuple[int, ...], stop: StopReason
) -> None:
    outcome = run_one(environment(), TokenModel(sampled([1], ids, stop=stop)))
    assert outcome.stop_reason is stop
    assert outcome.stop_reason.truncated is (stop is StopReason.LENGTH)


def test_logprobs_and_weight_versions_follow_their_tokens_over_turns() -> None:
    model = TokenModel(sampled([1], [5, 6], CALL, version=3), sampled([2], [7], version=4))
    outcome = run_one(with_tool(), model)
    assert outcome.logprobs == (0.0, -5 / 8, -6 / 8, 0.0, -7 / 8)
    assert outcome.weight_versions == (3, 3, 4)


def test_an_answer_without_a_single_sampled_token_is_a_trajectory() -> None:
    outcome = run_one(environment(), TokenModel(sampled([1], [])))
    assert outcome.token_mask == (0,)
    assert outcome.weight_versions == ()


def test_an_answer_without_a_tool_call_stops() -> None:
    outcome = run_one(with_tool(), ScriptedChatModel(in_turns("fine")))
    assert (outcome.stop_reason, len(outcome.turns)) == (StopReason.STOP, 1)


def test_a_tool_call_in_the_last_turn_is_the_tool_limit_and_is_not_served() -> None:
    served: list[str] = []

    def record(text: str) -> str:
        served.append(text)
        return text

    outcome = run_one(with_tool(record, max_turns=2), ScriptedChatModel(in_turns(CALL)))
    assert outcome.stop_reason is StopReason.TOOL_LIMIT
    assert len(outcome.turns) == 2
    assert served == ["hi"]
    assert outcome.text == CALL
    assert outcome.metrics["tool_calls"] == 2


def test_a_cut_off_answer_ends_the_rollout_even_if_its_call_is_complete() -> None:
    model = TokenModel(sampled([1], [5], CALL, StopReason.LENGTH))
    outcome = run_one(with_tool(), model)
    assert (outcome.stop_reason, len(model.calls)) == (StopReason.LENGTH, 1)


def test_without_tools_a_call_is_just_text() -> None:
    outcome = run_one(environment(), ScriptedChatModel(in_turns(CALL)))
    assert (outcome.stop_reason, outcome.metrics["tool_calls"]) == (StopReason.STOP, 0)


def test_a_conversation_that_fills_the_context_ends_by_length_with_the_turns_it_has() -> None:
    local = with_tool(lambda text: "x" * 500)
    outcome = run_one(local, ScriptedChatModel(in_turns(CALL, "done"), context_length=300))
    assert (outcome.stop_reason, len(outcome.turns)) == (StopReason.LENGTH, 1)
    assert outcome.text == CALL


def test_a6_one_prompt_that_is_too_long_fails_its_own_group_only() -> None:
    rows = [row("short", row_id="a"), row("l" * 2000, row_id="b"), row("short", row_id="c")]
    outcomes = run(rows, environment(), ScriptedChatModel(in_turns("x"), context_length=1024), group_size=2)
    assert [isinstance(outcome, Trajectory) for outcome in outcomes] == [True, True, False, False, True, True]
    failure = outcomes[2]
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.DATA
    assert "'b'" in failure.error
    assert "1024" in failure.error


def test_an_answer_that_the_engine_aborted_is_an_infra_failure_and_not_a_sample() -> None:
    outcome = run_one(environment(), TokenModel(sampled([1], [5], stop=StopReason.ABORTED)))
    assert isinstance(outcome, RolloutFailure)
    assert outcome.kind is FailureKind.INFRA


def test_calculator_from_question_to_reward() -> None:
    question = row("What is 37 * 82?", agent="calculator", answer="3034")
    call = render_tool_call("calculator", {"expression": "37*82"})
    model = ScriptedChatModel(in_turns(call, "3034"))
    (outcome,) = run([question], get_environment("calculator"), model)
    assert isinstance(outcome, Trajectory)
    assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.STOP)
    tokenizer = model.tokenizer
    text = tokenizer.decode(outcome.token_ids, skip_control_tokens=False)
    assert text == (
        "<|im_start|>user\nWhat is 37 * 82?<|im_end|>\n<|im_start|>assistant\n"
        f"{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3034\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "3034<|im_end|>"
    )
    mine = [token for token, flag in zip(outcome.token_ids, outcome.token_mask, strict=True) if flag]
    assert tokenizer.decode(mine, skip_control_tokens=False) == f"{call}<|im_end|>3034<|im_end|>"
