"""In-process environments behind the interface of Gym's: equal trajectories, and no setting is lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from rl_gym_bridge.answers.outcomes import OutcomeMaker
from rl_gym_bridge.chat import ChatModelError, ChatReply, ChatRequest
from rl_gym_bridge.client import Answer
from rl_gym_bridge.config import EffortLevel, NemoGymConfig, RewardPenalties
from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environment import EnvironmentDefinitionError, LocalEnvironment, RolloutResponse, Tool
from rl_gym_bridge.failures import GymConfigError
from rl_gym_bridge.local_runner import LocalRunner
from rl_gym_bridge.request_body import GenerationOverrides
from rl_gym_bridge.requests import RolloutRequest, RolloutResult
from rl_gym_bridge.rollouts import run_nemo_gym_rollout_sync, stream_nemo_gym_rollouts
from rl_gym_bridge.testing import ScriptedChatModel, in_turns
from rl_gym_bridge.tool_calls import render_tool_call
from rl_gym_bridge.trajectory import FailureKind, RolloutFailure, StopReason, Trajectory

CALL = render_tool_call("echo", {"text": "hi"})
LEVEL = EffortLevel("low", share=1.0, instruction="Be brief.", token_budget=3, token_penalty=0.25)
PENALTIES = RewardPenalties(invalid_tool_call=0.5, malformed_thinking=0.125)


def row(name: str = "r0", **params: Any) -> GymRow:
    return GymRow.from_mapping(
        {
            "responses_create_params": {"input": f"question {name}", **params},
            "agent_ref": {"name": "e"},
            "row_id": name,
            "answer": "yes",
        }
    )


def verify(of: GymRow, response: RolloutResponse) -> float:
    return float(of.verifier["answer"] in response.text)


def environment(judge: Callable[..., Any] = verify, **settings: Any) -> dict[str, LocalEnvironment]:
    return {"e": LocalEnvironment("e", judge, **settings)}


def run(runner: Any, rows: Sequence[GymRow] = (row(),), **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "group_size": 2,
        "step": 3,
        "seed": 7,
        "generation": GenerationOverrides(max_new_tokens=64),
        "timeout_s": 20.0,
        **changes,
    }
    return run_nemo_gym_rollout_sync(runner, rows, **settings)


class AsGym:
    """What a Gym with the same environment, model and verifier would answer, in Gym's own form."""

    def __init__(self, script: Callable[[ChatRequest], str], **config: Any) -> None:
        self.model = ScriptedChatModel(script)
        self.outcomes = OutcomeMaker(NemoGymConfig(model_name="policy", **config))

    async def run_rollouts(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[RolloutResult]:
        for request in requests:
            await asyncio.sleep(0)
            yield self.outcomes.result(request, Answer(self.answer(request), 1, 0.0))

    def answer(self, request: RolloutRequest) -> dict[str, Any]:
        of = GymRow.from_mapping(request.body)
        limit = of.responses_create_params["max_output_tokens"]
        (reply,) = self.model.chat([ChatRequest(of.messages, limit)])
        assert isinstance(reply, ChatReply)
        thoughts, closed, rest = reply.text.partition("</think>")
        thinking = bool(closed) and thoughts.startswith("<think>")
        text = rest if thinking else reply.text
        items: list[dict[str, Any]] = [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": thoughts[len("<think>") :]}]}
        ]
        message = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
            "prompt_token_ids": list(reply.prompt_token_ids),
            "generation_token_ids": list(reply.generation_token_ids),
            "generation_log_probs": list(reply.generation_logprobs),
            "weight_versions": [reply.weight_version] * len(reply.generation_token_ids),
        }
        cut = reply.stop_reason is StopReason.LENGTH
        response = {
            "output": [*(items if thinking else []), message],
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }
        reward = verify(of, RolloutResponse(reply.text, (), reply.stop_reason))
        return {**request.body, "response": response, "reward": reward}


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "no",
        "",
        "<tool_call>{} yes",
        "<think>yes",
        "hm</think>yes",
        "yes " * 40,
        "<think>hm</think>yes",
    ],
)
@pytest.mark.parametrize("levels", [(), (LEVEL,)], ids=["no level", "low"])
def test_both_paths_give_equal_trajectories(text: str, levels: tuple[EffortLevel, ...]) -> None:
    rows = [row("r0"), row("r1")]
    settings: dict[str, Any] = {"penalties": PENALTIES, "effort_levels": levels}
    local = LocalRunner(environment(), ScriptedChatModel(in_turns(text)), max_new_tokens=5, **settings)
    here = run(local, rows, effort_levels=levels)
    there = run(AsGym(in_turns(text), **settings), rows, effort_levels=levels)
    for mine, gyms in zip(here.outcomes, there.outcomes, strict=True):
        assert isinstance(gyms, Trajectory)
        metrics = {name: value for name, value in mine.metrics.items() if name != "tool_errors"}
        # Gym keeps thinking apart from the text that is shown to people.
        shown = gyms.text if "<think>hm</think>" in text else mine.text
        assert replace(mine, metrics=metrics, text=shown) == gyms


def test_a_tool_makes_further_turns_whose_prompts_extend_the_rollout() -> None:
    tool = Tool("echo", "Says it again.", {"type": "object"}, lambda text: text)
    model = ScriptedChatModel(in_turns(CALL, "yes"))
    runner = LocalRunner(environment(tools=(tool,), max_turns=3), model, max_new_tokens=99)
    batch = run(runner, generation=GenerationOverrides())
    for outcome in batch.outcomes:
        assert (len(outcome.turns), outcome.reward, outcome.metrics["tool_calls"]) == (2, 1.0, 1.0)
    assert [len(calls) for calls in model.calls] == [2, 2]
    assert batch.metrics["e/reward_mean"] == 1.0


def test_what_the_run_asks_for_reaches_the_model() -> None:
    model = ScriptedChatModel(in_turns("yes"))
    runner = LocalRunner(environment(), model, max_new_tokens=9)
    run(runner, generation=GenerationOverrides(temperature=0.0, seeded=True), effort_levels=())
    run(runner, generation=GenerationOverrides(temperature=1.0, top_p=1.0, max_new_tokens=4))
    (first, second), (third, _) = model.calls
    assert (first.greedy, first.max_new_tokens) == (True, 9)
    assert isinstance(first.seed, int)
    assert first.seed != second.seed
    assert (third.greedy, third.max_new_tokens, third.seed) == (False, 4, None)


def test_turns_of_a_seeded_rollout_draw_different_numbers_and_the_same_ones_again() -> None:
    tool = Tool("echo", "Says it again.", {"type": "object"}, lambda text: text)
    seeds = []
    for _ in range(2):
        model = ScriptedChatModel(in_turns(CALL, "yes"))
        runner = LocalRunner(environment(tools=(tool,), max_turns=3), model, max_new_tokens=99)
        run(runner, generation=GenerationOverrides(seeded=True))
        seeds.append([request.seed for calls in model.calls for request in calls])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


@pytest.mark.parametrize(
    ("generation", "name"),
    [
        (GenerationOverrides(temperature=0.7), "temperature"),
        (GenerationOverrides(top_p=0.9), "top_p"),
        (GenerationOverrides(extra_body={"top_k": 5}), "top_k"),
        (GenerationOverrides(chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs"),
    ],
)
def test_what_a_chat_model_cannot_be_told_is_refused_before_anything_is_sampled(
    generation: GenerationOverrides, name: str
) -> None:
    model = ScriptedChatModel(in_turns("yes"))
    with pytest.raises(GymConfigError, match=name):
        run(LocalRunner(environment(), model, max_new_tokens=9), generation=generation)
    assert model.calls == []


def test_a_model_that_samples_otherwise_may_be_asked_for_that() -> None:
    model = ScriptedChatModel(in_turns("yes"))
    runner = LocalRunner(environment(), model, max_new_tokens=9, temperature=0.7, top_p=0.9)
    assert run(runner, generation=GenerationOverrides(temperature=0.7, top_p=0.9)).outcomes[0].reward == 1.0
    with pytest.raises(GymConfigError, match=r"ask for 0 or 0\.7"):
        run(runner, generation=GenerationOverrides(temperature=1.0))


def test_an_environment_that_is_not_there_is_named() -> None:
    model = ScriptedChatModel(in_turns("yes"))
    with pytest.raises(EnvironmentDefinitionError, match="'e'"):
        run(LocalRunner({}, model, max_new_tokens=9))


def test_c11_failures_are_records_in_their_places() -> None:
    """C11: a verifier that raises, and a level without a price."""

    def judge(of: GymRow, response: RolloutResponse) -> float:
        if of.row_id == "r1":
            raise KeyError("answer")
        return 1.0

    batch = run(
        LocalRunner(environment(judge), ScriptedChatModel(in_turns("x")), max_new_tokens=9),
        [row("r0"), row("r1")],
    )
    assert [isinstance(outcome, RolloutFailure) for outcome in batch.outcomes] == [False, False, True, True]
    assert "KeyError" in batch.outcomes[2].error
    unpriced = LocalRunner(environment(), ScriptedChatModel(in_turns("x")), max_new_tokens=9)
    for outcome in run(unpriced, effort_levels=(LEVEL,)).outcomes:
        assert "same levels" in outcome.error


def test_a_model_that_fails_is_infra_and_one_that_breaks_its_contract_is_raised() -> None:
    class Model:
        def chat(self, requests: Sequence[ChatRequest]) -> Any:
            raise ConnectionResetError("engine gone")

    for outcome in run(LocalRunner(environment(), Model(), max_new_tokens=9)).outcomes:
        assert (outcome.kind, "engine gone" in outcome.error) == (FailureKind.INFRA, True)

    class Mute(Model):
        def chat(self, requests: Sequence[ChatRequest]) -> Any:
            return []

    with pytest.raises(ChatModelError, match="0 replies for 2"):
        run(LocalRunner(environment(), Mute(), max_new_tokens=9))


def test_short_rollouts_come_before_long_ones_end_and_the_loop_is_not_held_up() -> None:
    tool = Tool("echo", "Says it again.", {"type": "object"}, lambda text: text)

    def script(request: ChatRequest) -> str:
        time.sleep(0.1)
        return "yes" if "r0" in request.messages[0]["content"] else CALL

    ticks = 0

    async def scenario() -> list[str]:
        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        model = ScriptedChatModel(script)
        runner = LocalRunner(environment(tools=(tool,), max_turns=4), model, max_new_tokens=99)
        settings: dict[str, Any] = {
            "group_size": 1,
            "step": 0,
            "seed": 0,
            "generation": GenerationOverrides(),
        }
        seen = []
        async with aclosing(stream_nemo_gym_rollouts(runner, [row("r1"), row("r0")], **settings)) as stream:
            async for group in stream:
                seen.append(group.row.row_id)
                if len(seen) == 1:
                    assert len(model.calls) < 4
        ticking.cancel()
        return seen

    assert asyncio.run(scenario()) == ["r0", "r1"]
    assert ticks > 5


def test_the_verifier_sees_the_rows_own_fields_and_id() -> None:
    seen: list[GymRow] = []

    def judge(of: GymRow, response: RolloutResponse) -> float:
        seen.append(of)
        return 1.0

    without_id = GymRow.from_mapping(
        {"responses_create_params": {"input": "q"}, "agent_ref": {"name": "e"}, "answer": ["x"]}
    )
    run(LocalRunner(environment(judge), ScriptedChatModel(in_turns("x")), max_new_tokens=9), [without_id])
    assert {of.row_id for of in seen} == {without_id.row_id}
    assert json.dumps(seen[0].verifier) == '{"answer": ["x"]}'
