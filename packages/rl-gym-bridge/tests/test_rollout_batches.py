"""In-process rollouts: order, ids, seeds, and the faults of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rl_gym_bridge.chat import ChatModelError, ChatReply, ChatRequest, PromptRejected
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environments import get_environment
from rl_gym_bridge.local import (
    EnvironmentDefinitionError,
    LocalEnvironment,
    Tool,
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


def test_all_unfinished_rollouts_take_their_turn_in_one_call() -> None:
    model = ScriptedChatModel(lambda request: CALL if request.messages[0]["content"] == "tool" else "done")
    rows = [row("plain", row_id="a"), row("tool", row_id="b"), row("plain", row_id="c")]
    outcomes = run(rows, with_tool(max_turns=3), model, group_size=2)
    assert [len(call) for call in model.calls] == [6, 2, 2]
    assert [len(outcome.turns) for outcome in outcomes if isinstance(outcome, Trajectory)] == [
        1,
        1,
        3,
        3,
        1,
        1,
    ]


def test_rows_keep_their_order_and_groups_are_contiguous_with_unique_ids() -> None:
    model = ScriptedChatModel(lambda request: str(request.messages[0]["content"]))
    rows = [row(name, row_id=name) for name in "abc"]
    outcomes = run(rows, environment(), model, group_size=2, step=7)
    assert [getattr(outcome, "text", None) for outcome in outcomes] == ["a", "a", "b", "b", "c", "c"]
    assert [outcome.group_id for outcome in outcomes] == [f"train/7/{g}" for g in (0, 0, 1, 1, 2, 2)]
    assert len({outcome.rollout_id for outcome in outcomes}) == 6
    others = run(rows, environment(), model, group_size=2, step=8) + run(
        rows, environment(), model, group_size=2, step=7, group_prefix="held-out"
    )
    assert not {outcome.rollout_id for outcome in outcomes} & {outcome.rollout_id for outcome in others}


def test_no_rows_are_no_rollouts_and_no_call() -> None:
    model = ScriptedChatModel(in_turns("x"))
    assert run([], environment(), model) == []
    assert model.calls == []


def seeds(rows: Sequence[GymRow], **changes: Any) -> dict[str, list[list[int | None]]]:
    """For each row id, the seeds of its rollouts, turn by turn."""
    model = ScriptedChatModel(in_turns(CALL, "done"))
    run(rows, with_tool(), model, **{"group_size": 2, **changes})
    found: dict[str, list[list[int | None]]] = {}
    for index in range(len(model.calls[0])):
        name = str(model.calls[0][index].messages[0]["content"])
        found.setdefault(name, []).append([call[index].seed for call in model.calls])
    return found


def test_seeds_do_not_depend_on_the_rows_beside() -> None:
    a, b = row("a", row_id="a"), row("b", row_id="b")
    assert seeds([a, b]) == seeds([b, a]) == {**seeds([a]), **seeds([b])}


def test_every_model_call_of_a_run_has_a_seed_of_its_own() -> None:
    a, b = row("a", row_id="a"), row("b", row_id="b")
    every = [
        seed
        for step in (0, 1)
        for run_seed in (0, 1)
        for rollouts in seeds([a, b, a], step=step, seed=run_seed).values()
        for turns in rollouts
        for seed in turns
    ]
    assert len(every) == 2 * 2 * 3 * 2 * 2
    assert len(set(every)) == len(every)
    assert all(seed is not None and 0 <= seed < 2**63 for seed in every)


def test_seeds_are_the_same_in_every_release_and_process() -> None:
    assert seeds([row("a", row_id="a")], seed=3, step=5)["a"] == [
        [3631007303320970686, 3563399995366075393],
        [338137671443508023, 6649886192689778611],
    ]


def test_greedy_and_limits_reach_the_model() -> None:
    model = ScriptedChatModel(in_turns("x"))
    run([row()], environment(), model, greedy=True, max_new_tokens=5)
    assert (model.calls[0][0].greedy, model.calls[0][0].max_new_tokens) == (True, 5)


@pytest.mark.parametrize("wrong", [{"group_size": 0}, {"max_new_tokens": 0}])
def test_sizes_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run([row()], environment(), ScriptedChatModel(in_turns("x")), **wrong)


def test_an_unknown_environment_is_refused_before_anything_is_sampled() -> None:
    model = ScriptedChatModel(in_turns("x"))
    local = get_environment("calculator")
    with pytest.raises(EnvironmentDefinitionError, match="did you mean 'calculator'"):
        run([row(agent="calculator"), row(row_id="bad", agent="calulator")], local, model)
    assert model.calls == []


def test_a_row_that_has_no_text_prompt_is_a_data_failure_beside_the_others() -> None:
    image = GymRow({"input": [{"type": "input_image"}]}, {"name": "e"}, {}, "image")
    failure, other = run([image, row()], environment(), ScriptedChatModel(in_turns("x")))
    assert isinstance(failure, RolloutFailure)
    assert isinstance(other, Trajectory)
    assert "'image'" in failure.error


class BrokenInTurnTwo(ScriptedChatModel):
    def chat(self, requests: Sequence[ChatRequest]) -> Any:
        if self.calls:
            raise ConnectionResetError("engine gone")
        return super().chat(requests)


def broken() -> BrokenInTurnTwo:
    answers = iter(["done", CALL, "done"])
    return BrokenInTurnTwo(lambda request: next(answers))


def test_a_broken_model_is_loud_and_keeps_its_cause() -> None:
    with pytest.raises(ChatModelError, match=r"turn 2 of step 4 with 1 requests .*engine gone") as caught:
        run([row()], with_tool(), broken(), group_size=3, step=4)
    assert isinstance(caught.value.__cause__, ConnectionResetError)


def test_recorded_model_failures_are_infra_and_keep_what_had_finished() -> None:
    outcomes = run([row()], with_tool(), broken(), group_size=3, on_model_error="record")
    assert [type(outcome) for outcome in outcomes] == [Trajectory, RolloutFailure, Trajectory]
    failure = outcomes[1]
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.INFRA
    assert "turn 2 of step 0: ConnectionResetError: engine gone" in failure.error


def test_an_interrupt_is_not_swallowed() -> None:
    class Interrupted:
        def chat(self, requests: Sequence[ChatRequest]) -> list[ChatReply | PromptRejected]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([row()], environment(), Interrupted(), on_model_error="record")


@pytest.mark.parametrize("change", [lambda replies: replies[:-1], lambda replies: [*replies, *replies]])
def test_k6_another_number_of_replies_than_requests_is_refused(
    change: Callable[[list[Any]], list[Any]],
) -> None:
    class Miscounting(ScriptedChatModel):
        def chat(self, requests: Sequence[ChatRequest]) -> Any:
            return change(super().chat(requests))

    with pytest.raises(ChatModelError, match="replies for 8 requests"):
        run([row()], environment(), Miscounting(in_turns("x")), group_size=8, on_model_error="record")


class Replying:
    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def chat(self, requests: Sequence[ChatRequest]) -> list[Any]:
        return [self.reply for _ in requests]


def test_a_reply_of_another_kind_is_refused() -> None:
    with pytest.raises(ChatModelError, match="NoneType as reply 0"):
        run_one(environment(), Replying(None))


def test_logprobs_that_do_not_match_their_tokens_are_a_failure_and_not_a_sample() -> None:
    reply = ChatReply((1,), (5, 6), (-0.1,), "x", StopReason.STOP, 0)
    outcome = run_one(environment(), Replying(reply))
    assert isinstance(outcome, RolloutFailure)
    assert "2 sampled tokens but 1" in outcome.error
