"""Whether a rollout of an acceptance case is exactly what the case says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..requests import RolloutResult
from ..trajectory import Trajectory
from .cases import AcceptanceCase
from .contract import contract_findings
from .expectation import ExpectedCall, expected_calls
from .findings import MISSING, Finding, at
from .model_calls import CallKind, ModelCall
from .responses_input import plain


def case_findings(
    case: AcceptanceCase,
    row: Mapping[str, Any],
    result: RolloutResult,
    calls: Sequence[ModelCall],
    *,
    generation: Mapping[str, Any],
    models: tuple[str, str],
) -> tuple[Finding, ...]:
    """Findings on one rollout of a case: the contract of every rollout, and the case's goldens.

    What is expected of tokens is computed from the row and the script alone, never from the answer.

    Args:
        case: what was run.
        row: its row, as it stands in Gym.
        result: how the rollout ended.
        calls: every request that the model server got for it.
        generation: settings of the run that replace the row's.
        models: names of the policy and of the judge.
    """
    source = row["responses_create_params"]
    general = contract_findings(result, calls, source=source, generation=generation, models=models)
    outcome, answer = result.outcome, result.answer
    if not isinstance(outcome, Trajectory) or answer is None:
        return general
    expected = expected_calls(
        source, case.turns, case.tool_outputs, max_tokens=generation.get("max_output_tokens")
    )
    policy = [call for call in calls if call.kind is CallKind.POLICY]
    return (
        *general,
        *_verdict(case, result, outcome, answer),
        *_counts(case, calls),
        *_calls(expected, policy),
        *_tool_outputs(case, policy),
        *_turns(expected, outcome),
    )


def _verdict(
    case: AcceptanceCase, result: RolloutResult, outcome: Trajectory, answer: Mapping[str, Any]
) -> list[Finding]:
    return [
        Finding.equal("the row's agent ran it", case.agent, result.request.agent),
        Finding.equal("the trajectory names the agent", case.agent, outcome.agent),
        Finding.equal("Gym's reward", case.reward, answer.get("reward")),
        Finding.equal("the trajectory's reward", case.reward, outcome.reward),
        *(Finding.equal(f"verifier: {path}", value, at(answer, path)) for path, value in case.answer.items()),
        *(
            Finding.holds(
                f"verifier: no {path}",
                (found := at(answer, path)) is None or found is MISSING,
                expected="nothing",
                got=found,
            )
            for path in case.absent
        ),
    ]


def _counts(case: AcceptanceCase, calls: Sequence[ModelCall]) -> list[Finding]:
    of_kind = {kind: sum(call.kind is kind for call in calls) for kind in CallKind}
    return [
        Finding.equal("calls of the policy", case.policy_calls, of_kind[CallKind.POLICY]),
        Finding.equal("calls of the judge", case.judge_calls, of_kind[CallKind.JUDGE]),
    ]


def _calls(expected: Sequence[ExpectedCall], policy: Sequence[ModelCall]) -> list[Finding]:
    findings: list[Finding] = []
    for index, (want, call) in enumerate(zip(expected, policy, strict=False)):
        findings += [
            Finding.equal(
                f"call {index}: the whole history",
                plain(want.messages),
                plain(call.body.get("messages") or ()),
            ),
            Finding.equal(f"call {index}: exact prompt", want.prompt_token_ids, call.prompt_token_ids),
            Finding.equal(
                f"call {index}: exact answer", want.generation_token_ids, call.generation_token_ids
            ),
        ]
    return findings


def _tool_outputs(case: AcceptanceCase, policy: Sequence[ModelCall]) -> list[Finding]:
    findings: list[Finding] = []
    for index, outputs in enumerate(case.tool_outputs):
        if not outputs or index + 1 >= len(policy):
            continue
        messages = policy[index + 1].body.get("messages") or ()
        shown = [message.get("content") for message in messages if message.get("role") == "tool"]
        findings.append(
            Finding.equal(
                f"call {index + 1}: shows what the tools gave", list(outputs), shown[-len(outputs) :]
            )
        )
    return findings


def _turns(expected: Sequence[ExpectedCall], outcome: Trajectory) -> list[Finding]:
    """The trajectory, token by token; the prompt of a turn is what is new in it."""
    findings: list[Finding] = []
    seen: tuple[int, ...] = ()
    for index, (want, turn) in enumerate(zip(expected, outcome.turns, strict=False)):
        findings += [
            Finding.equal(
                f"turn {index}: exact new prompt tokens",
                want.prompt_token_ids[len(seen) :],
                turn.prompt_token_ids,
            ),
            Finding.equal(
                f"turn {index}: exact sampled tokens", want.generation_token_ids, turn.generation_token_ids
            ),
            Finding.equal(
                f"turn {index}: exact log-probabilities",
                want.generation_log_probs,
                turn.generation_logprobs,
            ),
        ]
        seen = want.prompt_token_ids + want.generation_token_ids
    return findings
