"""Many rollouts at the same time, none mixed up with another."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from rl_gym_bridge.testing import ScriptedTurn, gym_cases
from rl_gym_bridge.testing.gym_run import GymRun
from rl_gym_bridge.trajectory import Trajectory

CASES = {case.name: case for case in gym_cases()}
ROLLOUTS = 64


def test_accepted_and_rejected_rollouts_do_not_mix(gym: GymRun, rows: dict[str, dict[str, Any]]) -> None:
    """Each has an answer of its own; a reward or a token of another one would be seen."""
    requests = []
    expected: dict[str, tuple[float, str]] = {}
    for index in range(ROLLOUTS):
        verdict, letter, reward = ("accepted", "E", 1.0) if index % 2 else ("rejected", "J", 0.0)
        script = f"mcqa {index}"
        text = f"Thought {index}. \\boxed{{{letter}}}"
        gym.server.script(script, (ScriptedTurn(content=text, delay_s=0.02 * (index % 5)),))
        (request,) = gym.requests_for(
            rows[f"mcqa/{verdict}"], script=script, agent=CASES["mcqa/accepted"].agent
        )
        requests.append(request)
        expected[request.rollout_id] = (reward, text)
    random.Random(0).shuffle(requests)
    results = gym.run(requests)
    got = {}
    for result in results:
        assert isinstance(result.outcome, Trajectory), result.outcome
        got[result.request.rollout_id] = (result.outcome.reward, result.outcome.text)
        assert result.answer is not None
        assert result.answer["response"]["metadata"]["scripted_case"] in result.request.rollout_id
    assert got == expected


def test_tool_sessions_do_not_mix(gym: GymRun, rows: dict[str, dict[str, Any]]) -> None:
    """Each rollout changes a calendar of its own: one that saw another's change would be told so by the
    verifier."""
    requests = []
    for index in range(16):
        case = CASES[f"workplace_assistant/{'accepted' if index % 2 else 'rejected'}"]
        gym.server.script(case.name, case.turns)
        (request,) = gym.requests_for(rows[case.name], script=case.name, agent=case.agent)
        requests.append((f"{case.name}-{index}", case, request))
    results = gym.run(
        [_renamed(request, name) for name, _, request in requests],
    )
    rewards = {result.request.rollout_id: result.outcome for result in results}
    for name, case, _ in requests:
        outcome = rewards[name]
        assert isinstance(outcome, Trajectory), outcome
        assert outcome.reward == case.reward
        assert len(outcome.turns) == 3
    assert len(gym.server.calls) == 48


def _renamed(request: Any, name: str) -> Any:
    return dataclasses.replace(request, rollout_id=name)
