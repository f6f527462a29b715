"""What a scripted rollout must show: every prompt and every answer, token by token, from the row and the
script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .chat_template import logprob, next_prompt, prompt_tokens, sample
from .responses_input import answer_message, chat_messages, chat_tools, tool_message
from .scripted_turn import ScriptedTurn


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """One call of the policy.

    Attributes:
        messages: the history that the model must be shown.
        prompt_token_ids: the whole prompt.
        generation_token_ids: the answer.
        generation_log_probs: log-probability of each of its tokens.
    """

    messages: tuple[Mapping[str, Any], ...]
    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]
    generation_log_probs: tuple[float, ...]


def expected_calls(
    params: Mapping[str, Any],
    turns: Sequence[ScriptedTurn],
    tool_outputs: Sequence[Sequence[str]] = (),
    *,
    max_tokens: int | None = None,
) -> tuple[ExpectedCall, ...]:
    """The calls of a rollout in which the policy says ``turns``.

    Args:
        params: ``responses_create_params`` of the row.
        turns: what the policy says.
        tool_outputs: per turn, what each of its tool calls gives.
        max_tokens: bound on each answer.

    Raises:
        TemplateError: the row's input cannot be rendered.
        ValueError: a turn has another number of tool calls than of outputs.
    """
    messages = chat_messages(params)
    prompt = prompt_tokens(messages, chat_tools(params))
    calls: list[ExpectedCall] = []
    for index, turn in enumerate(turns):
        sampled = sample(turn, max_tokens)
        calls.append(
            ExpectedCall(
                messages=tuple(messages),
                prompt_token_ids=tuple(prompt),
                generation_token_ids=sampled.token_ids,
                generation_log_probs=tuple(
                    logprob(len(prompt) + place, token) for place, token in enumerate(sampled.token_ids)
                ),
            )
        )
        if index + 1 == len(turns):
            break
        outputs = tool_outputs[index] if index < len(tool_outputs) else ()
        if len(outputs) != len(turn.tool_calls):
            raise ValueError(
                f"turn {index} makes {len(turn.tool_calls)} tool calls and {len(outputs)} outputs are given"
            )
        answers = [tool_message(f"call-{index}-{number}", output) for number, output in enumerate(outputs)]
        messages = [*messages, answer_message(turn, index), *answers]
        prompt = next_prompt([*prompt, *sampled.token_ids], answers)
    return tuple(calls)
