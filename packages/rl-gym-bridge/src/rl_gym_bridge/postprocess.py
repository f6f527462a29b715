"""From Gym's answer to ``/run`` to an exact trajectory, or to an error that says why there is none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Literal

from .answers.model_calls import CallSequence, ModelCall, read_calls
from .answers.reward import MAX_ABS_REWARD, check_sample_is_valid, read_reward, verifier_metrics
from .answers.text import INVALID_TOOL_CALL_PATTERNS, THINKING_TAGS, read_text
from .failures import GymAnswerError, GymContinuityError, GymNoTokensError, GymTokenError
from .penalties import RAW_REWARD
from .routed_experts import RoutedExperts, RoutedExpertsError, join_calls
from .trajectory import StopReason, Trajectory, Turn

_INCOMPLETE_REASONS = {
    "max_output_tokens": StopReason.LENGTH,
    "content_filter": StopReason.ABORTED,
}


@dataclass(frozen=True, slots=True)
class _Ending:
    """How Gym says that a rollout ended: OpenAI's name for it, empty for a natural end, and its words."""

    reason: str
    words: str


def postprocess_nemo_gym_result(
    result: Mapping[str, Any],
    *,
    group_id: str = "",
    rollout_id: str = "",
    agent: str = "",
    on_discontinuity: Literal["fail", "keep_prefix"] = "fail",
    invalid_tool_call_patterns: Sequence[str] = INVALID_TOOL_CALL_PATTERNS,
    thinking_tags: tuple[str, str] = THINKING_TAGS,
    require_routed_experts: bool = False,
    routed_experts_dtype: str = "int16",
    max_abs_reward: float = MAX_ABS_REWARD,
    ignore_metrics: Collection[str] = (),
) -> Trajectory:
    """The trajectory that an answer of Gym tells of. The answer is not changed.

    Metrics of the trajectory are ``turns``, ``tool_calls`` and ``truncated`` (one flag per rollout) and every
    number and boolean that the verifier put at the top of the answer; one whose name is taken, also by a
    later step, appears as ``verifier/<name>``.

    Args:
        result: the parsed JSON object.
        group_id: goes into the trajectory.
        rollout_id: goes into the trajectory.
        agent: goes into the trajectory.
        on_discontinuity: what to do when a prompt does not extend the tokens before it: ``fail``, or keep the
            turns before it (``keep_prefix``). Those end ``ABORTED``, with the metric ``turns_dropped``;
            reward and verifier metrics judge the end that was dropped, so they have none.
        invalid_tool_call_patterns: text that shows a tool call which was not made.
        thinking_tags: opening and closing tag of the policy's thinking.
        require_routed_experts: whether every call must record the experts that the router chose; only then
            are they kept.
        routed_experts_dtype: integer type to keep them in.
        max_abs_reward: rewards and components beyond it are refused.
        ignore_metrics: fields that are no metrics, such as those of the row that Gym echoes.

    Raises:
        GymAnswerError: the answer is no usable sample; its subclasses say in which respect.
    """
    response = result.get("response") if isinstance(result, Mapping) else None
    if not isinstance(response, Mapping):
        raise GymAnswerError(
            f"the answer holds no response ({_described(result)})",
            remedy="check that the address is an agent's /run",
        )
    check_sample_is_valid(result, response)
    ending = _ending(response)
    sequence = read_calls(response.get("output"), cut_off_by=ending.reason, cause=ending.words)
    kept = _continuous(sequence.calls, keep_prefix=on_discontinuity == "keep_prefix")
    texts = [read_text(call.items) for call, _ in kept]
    turns = tuple(
        Turn(
            new,
            tuple(call.generation_token_ids),
            tuple(call.generation_logprobs),
            invalid_tool_call=text.has_invalid_tool_call(invalid_tool_call_patterns),
            malformed_thinking=text.has_malformed_thinking(thinking_tags),
        )
        for (call, new), text in zip(kept, texts, strict=True)
    )
    calls = [call for call, _ in kept]
    experts = _experts(calls, routed_experts_dtype) if require_routed_experts else None
    reward, components = read_reward(result, max_abs_reward=max_abs_reward)
    verifier = verifier_metrics(result, ignore=ignore_metrics)
    stop_reason = _stop_reason(result, sequence, ending, ignore=ignore_metrics)
    dropped = len(sequence.calls) - len(kept)
    if dropped:
        reward, stop_reason = None, StopReason.ABORTED
        components.clear()
        verifier.clear()
    own = {
        "turns": float(len(turns)),
        "tool_calls": float(sum(text.tool_calls for text in texts)),
        "truncated": float(stop_reason.truncated),
    }
    if dropped:
        own["turns_dropped"] = float(dropped)
    taken = {*own, RAW_REWARD}
    return Trajectory(
        turns=turns,
        reward=reward,
        stop_reason=stop_reason,
        group_id=group_id,
        rollout_id=rollout_id,
        agent=agent,
        weight_versions=_weight_versions(calls),
        reward_components=components,
        metrics={
            **{f"verifier/{name}" if name in taken else name: value for name, value in verifier.items()},
            **own,
        },
        text=texts[-1].answer,
        routed_experts=experts,
    )


def _ending(response: Mapping[str, Any]) -> _Ending:
    details = response.get("incomplete_details")
    notes = response.get("metadata")
    note = notes.get("ng_termination_reason") if isinstance(notes, Mapping) else None
    if details is None:
        _check_completed(response)
        return _Ending("", str(note or ""))
    reason = details.get("reason") if isinstance(details, Mapping) else None
    if not isinstance(reason, str) or reason not in _INCOMPLETE_REASONS:
        raise GymAnswerError(
            f"response.incomplete_details is {details!r}; a rollout that was cut off must say why, by one of "
            f"{', '.join(_INCOMPLETE_REASONS)}"
        )
    return _Ending(reason, f"incomplete because of {reason}")


def _check_completed(response: Mapping[str, Any]) -> None:
    """See that no status contradicts an end for which no reason is given; it would pass for a natural one."""
    output = response.get("output")
    items = [item for item in output if isinstance(item, Mapping)] if isinstance(output, list) else []
    said = [item for item in items if item.get("type") == "function_call" or item.get("role") == "assistant"]
    for name, status in (
        ("response.status", response.get("status")),
        ("the status of the model's last item", said[-1].get("status") if said else None),
    ):
        if status not in (None, "completed"):
            raise GymAnswerError(
                f"{name} is {status!r}, and response.incomplete_details does not say why",
                remedy="the agent must wait until the response has ended, and say why it was cut off",
            )


def _stop_reason(
    result: Mapping[str, Any], sequence: CallSequence, ending: _Ending, *, ignore: Collection[str]
) -> StopReason:
    if ending.reason:
        return _INCOMPLETE_REASONS[ending.reason]
    # An agent that steps an environment says so itself; a field of the row that is only echoed says nothing.
    if result.get("truncated") is True and "truncated" not in ignore:
        return StopReason.TOOL_LIMIT
    if sequence.open_tool_calls and result.get("terminated") is not True:
        return StopReason.TOOL_LIMIT
    return StopReason.STOP


def _continuous(calls: Sequence[ModelCall], *, keep_prefix: bool) -> list[tuple[ModelCall, tuple[int, ...]]]:
    """The calls, each with the tokens that are new in its prompt; up to the first break if that is wanted."""
    seen: list[int] = []
    kept: list[tuple[ModelCall, tuple[int, ...]]] = []
    for turn, call in enumerate(calls, start=1):
        prompt = call.prompt_token_ids
        if prompt[: len(seen)] != seen:
            if keep_prefix:
                break
            raise _broken(seen, prompt, turn)
        new = tuple(prompt[len(seen) :])
        kept.append((call, new))
        seen += new
        seen += call.generation_token_ids
    if not any(call.generation_token_ids for call, _ in kept):
        raise GymNoTokensError(
            "no token was sampled before the first prompt that does not extend the rollout"
        )
    return kept


def _broken(seen: list[int], prompt: list[int], turn: int) -> GymContinuityError:
    """What is wrong with a prompt that does not begin with the tokens seen so far."""
    agreed = takewhile(lambda pair: pair[0] == pair[1], zip(seen, prompt, strict=False))
    index = sum(1 for _ in agreed)
    got = prompt[index] if index < len(prompt) else None
    found = "the prompt ends there" if got is None else f"got {got}"
    return GymContinuityError(
        f"the prompt of turn {turn} does not extend the tokens seen so far: at index {index} {found}, "
        f"want {seen[index]}",
        turn=turn,
        index=index,
        got=got,
        want=seen[index],
        remedy="the engine must continue from the token ids that earlier assistant messages carry",
    )


def _weight_versions(calls: Sequence[ModelCall]) -> tuple[int, ...]:
    known = [call.weight_versions for call in calls if call.weight_versions is not None]
    if known and len(known) < len(calls):
        raise GymTokenError(f"{len(known)} of {len(calls)} model calls name the versions of their weights")
    return tuple(chain.from_iterable(known))


def _experts(calls: Sequence[ModelCall], dtype: str) -> RoutedExperts:
    missing = [number for number, call in enumerate(calls, start=1) if call.routed_experts is None]
    if missing:
        raise GymTokenError(
            f"model calls {missing} of {len(calls)} record no routed experts",
            remedy="switch router replay on at the engine, or off in the settings",
        )
    try:
        return join_calls(
            [RoutedExperts.parse(call.routed_experts, dtype) for call in calls],
            [len(call.prompt_token_ids) + len(call.generation_token_ids) for call in calls],
        )
    except RoutedExpertsError as error:
        raise GymTokenError(f"routed experts: {error}") from error


def _described(result: Any) -> str:
    if not isinstance(result, Mapping):
        return f"it is a {type(result).__name__}, not an object"
    return f"its fields are {', '.join(sorted(map(str, result))[:20]) or 'none'}"
