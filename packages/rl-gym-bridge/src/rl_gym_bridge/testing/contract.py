"""What every rollout has to show, whatever the environment: exact tokens, kept parameters, the right
requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..requests import RolloutResult
from ..trajectory import Trajectory
from .findings import MISSING, Finding, at, lost
from .model_calls import CallKind, ModelCall
from .responses_input import chat_tools

GENERATION_KEYS = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""The settings of the run that are put into each row, and what a chat request calls them."""

TOKEN_REQUEST: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
"""What a policy's chat request asks for, and a judge's never."""

_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def contract_findings(
    result: RolloutResult,
    calls: Sequence[ModelCall],
    *,
    source: Mapping[str, Any],
    generation: Mapping[str, Any],
    models: tuple[str, str],
) -> tuple[Finding, ...]:
    """Findings on one rollout.

    Args:
        result: how it ended.
        calls: every request that the model server got for it.
        source: ``responses_create_params`` of the row.
        generation: settings of the run that replace the row's: keys of :data:`GENERATION_KEYS`.
        models: names of the policy and of the judge.
    """
    outcome = result.outcome
    if not isinstance(outcome, Trajectory):
        return (
            Finding(
                "the rollout is a sample", False, "a trajectory", f"{outcome.kind.value}: {outcome.error}"
            ),
        )
    if result.answer is None:
        return (Finding("the answer is kept", False, "Gym's answer", "none"),)
    policy = [call for call in calls if call.kind is CallKind.POLICY]
    judge = [call for call in calls if call.kind is CallKind.JUDGE]
    return (
        Finding("the rollout is a sample", True, "a trajectory", "a trajectory"),
        *_reward(outcome, result.answer),
        *_parameters(result.answer, source, generation),
        *_requests(policy, source, generation, models[0]),
        *_judge_requests(judge, models),
        *_tokens(outcome, result.answer, policy),
        *_continuity(outcome, policy),
    )


def _reward(outcome: Trajectory, answer: Mapping[str, Any]) -> list[Finding]:
    reward = answer.get("reward")
    findings = [
        Finding.holds(
            "the reward is a finite number",
            isinstance(reward, (int, float)) and not isinstance(reward, bool) and math.isfinite(reward),
            expected="a finite number",
            got=reward,
        )
    ]
    parts = outcome.reward_components
    if parts and outcome.reward is not None:
        findings.append(
            Finding.holds(
                "the parts of the reward give its sum",
                math.isclose(math.fsum(parts.values()), outcome.reward, rel_tol=1e-6, abs_tol=1e-6),
                expected=str(outcome.reward),
                got=dict(parts),
            )
        )
    return findings


def _parameters(
    answer: Mapping[str, Any], source: Mapping[str, Any], generation: Mapping[str, Any]
) -> list[Finding]:
    """What the agent was asked for, as it gives it back."""
    echoed = answer.get("responses_create_params")
    # The script of the rollout is named in the metadata, which may have been null before.
    kept = {
        key: value
        for key, value in source.items()
        if key not in generation and not (key == "metadata" and value is None)
    }
    missing = lost(kept, echoed) if isinstance(echoed, Mapping) else "the answer gives none back"
    return [
        Finding("the agent keeps the row's request parameters", not missing, "all of them", missing or "all"),
        *(
            Finding.equal(f"the agent gets the run's {key}", value, at(echoed, key))
            for key, value in generation.items()
        ),
    ]


def _requests(
    policy: Sequence[ModelCall], source: Mapping[str, Any], generation: Mapping[str, Any], model: str
) -> list[Finding]:
    findings = [
        Finding.holds("the policy is asked", bool(policy), expected="at least one call", got=len(policy))
    ]
    wanted = {GENERATION_KEYS[key]: value for key, value in generation.items()}
    for key, name in GENERATION_KEYS.items():
        if key not in generation and source.get(key) is not None:
            wanted[name] = source[key]
    for key in ("tool_choice", "parallel_tool_calls"):
        # Only a text or a flag has the same form in both protocols.
        if isinstance(source.get(key), (str, bool)):
            wanted[key] = source[key]
    wanted |= {"model": model, **TOKEN_REQUEST}
    tools = chat_tools(source)
    for index, call in enumerate(policy):
        got = {key: call.body.get(key, MISSING) for key in wanted}
        findings.append(Finding.equal(f"call {index} asks with the right parameters", wanted, got))
        findings.append(
            Finding.equal(f"call {index} offers the row's tools", tools, call.body.get("tools") or [])
        )
    return findings


def _judge_requests(judge: Sequence[ModelCall], models: tuple[str, str]) -> list[Finding]:
    """A judge's calls carry no token contract; one that is asked for by the policy's name carries the
    policy's."""
    findings: list[Finding] = []
    for index, call in enumerate(call for call in judge if call.body.get("model") == models[1]):
        asked = sorted(key for key in TOKEN_REQUEST if call.body.get(key))
        carried = sorted(
            {key for message in call.body.get("messages") or () for key in _TOKEN_FIELDS if message.get(key)}
        )
        findings.append(Finding.equal(f"judge call {index} asks for no tokens", [], asked))
        findings.append(Finding.equal(f"judge call {index} carries no tokens", [], carried))
    return findings


def _tokens(outcome: Trajectory, answer: Mapping[str, Any], policy: Sequence[ModelCall]) -> list[Finding]:
    """The tokens that the server made are those of the answer and of the trajectory."""
    output = at(answer, "response.output")
    carriers = [
        item
        for item in (output if isinstance(output, list) else [])
        if isinstance(item, Mapping) and item.get("generation_token_ids")
    ]
    sampled = [call for call in policy if call.generation_token_ids]
    findings = [
        Finding.equal("every sampled answer is in Gym's answer", len(sampled), len(carriers)),
        Finding.equal("every sampled answer is a turn", len(sampled), len(outcome.turns)),
    ]
    for index, (call, item) in enumerate(zip(sampled, carriers, strict=False)):
        findings += [
            Finding.equal(f"call {index}: {field} reaches Gym's answer", list(made), item.get(field))
            for field, made in (
                ("prompt_token_ids", call.prompt_token_ids),
                ("generation_token_ids", call.generation_token_ids),
                ("generation_log_probs", call.generation_log_probs),
            )
        ]
    for index, (call, turn) in enumerate(zip(sampled, outcome.turns, strict=False)):
        findings += [
            Finding.equal(
                f"turn {index}: sampled tokens", call.generation_token_ids, turn.generation_token_ids
            ),
            Finding.equal(
                f"turn {index}: log-probabilities", call.generation_log_probs, turn.generation_logprobs
            ),
        ]
    if sampled:
        last = sampled[-1]
        findings += [
            Finding.equal(
                "the trajectory is the last prompt and answer",
                last.prompt_token_ids + last.generation_token_ids,
                outcome.token_ids,
            ),
            Finding.equal(
                "only sampled tokens are trained on",
                sum(len(call.generation_token_ids) for call in sampled),
                sum(outcome.token_mask),
            ),
        ]
    return findings


def _continuity(outcome: Trajectory, policy: Sequence[ModelCall]) -> list[Finding]:
    """Each prompt starts with all tokens before it, and the history gives them back as they were."""
    findings: list[Finding] = []
    for index in range(1, len(policy)):
        before, call = policy[index - 1], policy[index]
        seen = before.prompt_token_ids + before.generation_token_ids
        findings.append(
            Finding.equal(
                f"call {index}: the prompt extends the tokens before it",
                seen,
                call.prompt_token_ids[: len(seen)],
            )
        )
        carried = next(
            (
                message
                for message in reversed(call.body.get("messages") or ())
                if message.get("prompt_token_ids") is not None
            ),
            {},
        )
        given_back = {field: carried.get(field, MISSING) for field in _TOKEN_FIELDS}
        made = {
            "prompt_token_ids": list(before.prompt_token_ids),
            "generation_token_ids": list(before.generation_token_ids),
            "generation_log_probs": list(before.generation_log_probs),
        }
        findings.append(Finding.equal(f"call {index}: the history gives the tokens back", made, given_back))
    return findings
