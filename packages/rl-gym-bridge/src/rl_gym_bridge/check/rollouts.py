"""Runs the rows of a check through Gym and says what was found."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import DatasetError
from ..requests import RolloutResult
from ..testing.contract import contract_findings
from ..testing.findings import CaseReport, Finding, at
from ..testing.gym_run import GENERATION, GymRun, generation_settings
from ..testing.judges import Judge
from ..testing.model_calls import CallKind, ModelCall
from ..testing.scripted_turn import ScriptedTurn
from .rows import CheckedRow
from .scripts import Expectation, Script


def check_rows(gym: GymRun, rows: Sequence[CheckedRow], agent: str | None = None) -> Iterator[CaseReport]:
    """One report per rollout, and one per row that cannot be run; one rollout at a time.

    Args:
        gym: the started Gym.
        rows: the rows.
        agent: runs rows that name none; with a single agent in Gym it need not be named.
    """
    agents = sorted(gym.session.agents)
    fallback = agent or (agents[0] if len(agents) == 1 else None)
    usual_judge = gym.server.judge
    for row in rows:
        name = f"line {row.line}"
        if row.problem:
            yield CaseReport(name, (Finding("the row is valid", False, "a row", row.problem),))
            continue
        runs = row.agent or fallback
        if runs not in agents:
            got = runs or "the row names none; add agent_ref or --agent"
            yield CaseReport(name, (Finding("Gym has the agent", False, ", ".join(agents), got),))
            continue
        rewards: dict[str, float] = {}
        for script in row.scripts:
            title = f"{name} {script.verdict}".rstrip()
            try:
                report, reward = _check(gym, row, script, title, runs)
            except DatasetError as error:
                report, reward = _unusable(title, error), None
            finally:
                gym.server.judge = usual_judge
            if reward is not None:
                rewards[script.verdict] = reward
            yield report
        if len(rewards) > 1:
            accepted, rejected = rewards["accepted"], rewards["rejected"]
            yield CaseReport(
                name,
                (
                    Finding.holds(
                        "the accepted answer earns more than the rejected one",
                        accepted > rejected,
                        expected=f"more than {rejected}",
                        got=accepted,
                    ),
                ),
            )


def _check(
    gym: GymRun, row: CheckedRow, script: Script, title: str, agent: str
) -> tuple[CaseReport, float | None]:
    server = gym.server
    server.script(title, script.turns)
    server.clear()
    if script.judge:
        server.judge = _in_order(script.judge)
    began = time.monotonic()
    (request,) = gym.requests_for(row.row, script=title, agent=agent)
    with server.running(title):
        (result,) = gym.run([request])
    calls = server.calls_for(title)
    findings = contract_findings(
        result,
        calls,
        source=row.row["responses_create_params"],
        generation=generation_settings(GENERATION),
        models=(server.model, server.judge_model),
    )
    if result.answer is not None:
        findings += tuple(_expected(script.expect, result.answer, calls))
    return CaseReport(title, findings, time.monotonic() - began), _reward(result)


def _in_order(turns: tuple[ScriptedTurn, ...]) -> Judge:
    said: Callable[[], ScriptedTurn] = itertools.chain(turns, itertools.repeat(turns[-1])).__next__
    return lambda request: said()


def _expected(
    expect: Expectation, answer: Mapping[str, Any], calls: Sequence[ModelCall]
) -> Iterator[Finding]:
    if expect.reward is not None:
        yield Finding.equal("the reward", expect.reward, answer.get("reward"))
    for path, value in expect.answer.items():
        yield Finding.equal(f"verifier: {path}", value, at(answer, path))
    for kind, wanted in (
        (CallKind.POLICY, expect.policy_calls),
        (CallKind.JUDGE, expect.judge_calls),
    ):
        if wanted is not None:
            yield Finding.equal(
                f"calls of the {kind.value}", wanted, sum(call.kind is kind for call in calls)
            )


def _reward(result: RolloutResult) -> float | None:
    return getattr(result.outcome, "reward", None)


def _unusable(title: str, error: DatasetError) -> CaseReport:
    return CaseReport(title, (Finding("the row can be sent", False, "a row", str(error)),))
