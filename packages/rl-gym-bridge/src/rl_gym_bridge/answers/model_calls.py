"""The model calls of a rollout, read out of the flat list of items that Gym answers with.

Each call contributes reasoning, message and function-call items; its last item carries the tokens of all of
them. What the environment adds (tool outputs, user messages) stands between the calls.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..failures import GymAnswerError, GymNoTokensError, GymTokenError
from ..trajectory import LARGEST_LOGPROB, are_logprobs

_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_LARGEST_FLOAT = sys.float_info.max
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call with tokens that are known to be well formed.

    Attributes:
        items: what the model said, in order.
        prompt_token_ids: its whole prompt.
        generation_token_ids: what was sampled.
        generation_logprobs: one per sampled token.
        weight_versions: one per sampled token, ``None`` where the engine gave none.
        routed_experts: as the answer carries them, ``None`` where it does not.
    """

    items: tuple[Mapping[str, Any], ...]
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_logprobs: list[float]
    weight_versions: list[int] | None
    routed_experts: Any


@dataclass(frozen=True, slots=True)
class CallSequence:
    """All of a rollout's calls.

    Attributes:
        calls: in order, at least one.
        open_tool_calls: whether the rollout ends with tool outputs that the model never got to read.
    """

    calls: tuple[ModelCall, ...]
    open_tool_calls: bool


def read_calls(output: Any, *, cut_off_by: str, cause: str) -> CallSequence:
    """Split ``response.output`` into model calls and check their tokens.

    Args:
        output: the items.
        cut_off_by: Gym's reason why the rollout was cut off, empty where it was not. Where it was, a call
            that says nothing and carries no tokens sampled none: it is the end, and no call.
        cause: what Gym says of the end, for errors.

    Raises:
        GymAnswerError: the output is no list of items.
        GymTokenError: a call without tokens, or with tokens that do not correspond.
        GymNoTokensError: no call carries a token.
    """
    if not isinstance(output, list):
        raise GymAnswerError(f"response.output is a {type(output).__name__}, not a list")
    calls: list[ModelCall] = []
    pending: list[Mapping[str, Any]] = []
    ended = False
    for index, item in enumerate(output):
        if not isinstance(item, Mapping):
            raise GymAnswerError(f"response.output[{index}] is a {type(item).__name__}, not an object")
        where = f"response.output[{index}] (model call {len(calls) + 1})"
        if not _said_by_model(item, where):
            ended = _close(pending, ended, bool(cut_off_by), where, calls)
        elif _carries_tokens(item):
            if ended:
                raise GymTokenError(f"{where} carries tokens although an earlier call was cut off before any")
            calls.append(_checked_call((*pending, item), calls[-1] if calls else None, where))
            pending.clear()
        else:
            pending.append(item)
    ended = _close(pending, ended, bool(cut_off_by), f"the end (model call {len(calls) + 1})", calls)
    if not any(call.generation_token_ids for call in calls):
        raise GymNoTokensError(_why_no_tokens(calls, cut_off_by if ended else "", cause))
    return CallSequence(tuple(calls), _ends_with_tool_output(output))


def _close(
    pending: list[Mapping[str, Any]],
    ended: bool,
    cut_off: bool,
    where: str,
    calls: Sequence[ModelCall],
) -> bool:
    """End a call that carried no tokens, if there is one; whether the rollout has been cut off."""
    if not pending:
        return ended
    if cut_off and not any(_says_something(item) for item in pending):
        # Gym itself makes such an answer, with "max_output_tokens" for a prompt that leaves no room, and with
        # "content_filter" after a call of thinking alone where its server allows no further one.
        pending.clear()
        return True
    kinds = ", ".join(str(item.get("type")) for item in pending)
    problem = f"the model's items before {where} ({kinds}) carry no {', '.join(_TOKEN_FIELDS)}"
    if calls:
        raise GymTokenError(problem, remedy="the tokens of one call are lost; drop the rollout")
    raise GymNoTokensError(
        problem,
        remedy="set return_token_id_information: true at the policy's model server in Gym, and use an engine "
        "that reports token ids",
    )


def _why_no_tokens(calls: Sequence[ModelCall], cut_off_by: str, cause: str) -> str:
    said = f" (Gym says: {cause})" if cause else ""
    if cut_off_by == "max_output_tokens":
        return f"the prompt leaves no room for an answer in the model's context{said}"
    if cut_off_by:
        return f"the rollout was cut off before its first token{said}"
    if calls:
        return f"the model sampled no token in {len(calls)} calls{said}"
    return f"the answer holds no item of the model{said}"


def _said_by_model(item: Mapping[str, Any], where: str) -> bool:
    kind = item.get("type", "message")
    role = item.get("role")
    if kind == "message" and role not in ("assistant", "user", "system", "developer", "tool"):
        raise GymAnswerError(f"{where} is a message of role {role!r}")
    mine = kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant")
    if not mine and _carries_tokens(item):
        what = f"message of role {role!r}" if kind == "message" else f"item of type {kind!r}"
        raise GymTokenError(f"{where} is a {what} and carries sampled tokens; only the model samples")
    return mine


def _ends_with_tool_output(output: Sequence[Mapping[str, Any]]) -> bool:
    return bool(output) and output[-1].get("type") == "function_call_output"


def _says_something(item: Mapping[str, Any]) -> bool:
    """Whether an item says anything."""
    if item.get("type") == "function_call":
        return True
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        return bool(parts)
    return any(not isinstance(part, Mapping) or part.get("text") or part.get("refusal") for part in parts)


def _carries_tokens(item: Mapping[str, Any]) -> bool:
    return any(item.get(name) is not None for name in _TOKEN_FIELDS)


def _checked_call(items: tuple[Mapping[str, Any], ...], before: ModelCall | None, where: str) -> ModelCall:
    carrier = items[-1]
    prompt: Any = carrier.get("prompt_token_ids")
    sampled: Any = carrier.get("generation_token_ids")
    # The rest is compared with the tokens of the calls before, which are checked.
    known = len(before.prompt_token_ids) + len(before.generation_token_ids) if before else 0
    _check_ids(prompt, f"{where}.prompt_token_ids", start=known)
    _check_ids(sampled, f"{where}.generation_token_ids")
    if not prompt:
        raise GymTokenError(f"{where}.prompt_token_ids is empty; the first sampled token needs one before it")
    logprobs = _checked_logprobs(carrier.get("generation_log_probs"), f"{where}.generation_log_probs")
    if len(sampled) != len(logprobs):
        raise GymTokenError(
            f"{where} has {len(sampled)} generation_token_ids but {len(logprobs)} generation_log_probs; they "
            "must correspond one to one"
        )
    versions = carrier.get("weight_versions")
    if versions is not None:
        _check_ids(versions, f"{where}.weight_versions")
        if len(versions) != len(sampled):
            raise GymTokenError(
                f"{where} has {len(versions)} weight_versions for {len(sampled)} sampled tokens"
            )
    return ModelCall(items, prompt, sampled, logprobs, versions, carrier.get("routed_experts"))


def _check_ids(values: Any, where: str, *, start: int = 0) -> None:
    """A list of integers from 0 to ``_LARGEST_ID``. It runs at C speed, for lists of tens of thousands."""
    if not isinstance(values, list):
        raise GymTokenError(f"{where} is {_shown(values)}, not a list")
    new = values[start:]
    if not new or (set(map(type, new)) == {int} and min(new) >= 0 and max(new) <= _LARGEST_ID):
        return
    index, value = next(
        (i, v) for i, v in enumerate(new, start) if type(v) is not int or not 0 <= v <= _LARGEST_ID
    )
    raise GymTokenError(f"{where}[{index}] is {_shown(value)}, not an integer from 0 to {_LARGEST_ID}")


def _checked_logprobs(values: Any, where: str) -> list[float]:
    """A list of finite numbers ≤ 0, up to rounding, as floats."""
    if not isinstance(values, list):
        raise GymTokenError(f"{where} is {_shown(values)}, not a list")
    if set(map(type, values)) == {float} and are_logprobs(values):
        return values
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not -_LARGEST_FLOAT <= value <= LARGEST_LOGPROB:
            raise GymTokenError(f"{where}[{index}] is {_shown(value)}, not a finite number <= 0")
    return [float(value) for value in values]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
