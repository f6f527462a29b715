"""One in-process rollout as a state machine: it hands out requests, takes replies and ends in an outcome."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from .answers.reward import read_reward
from .answers.text import INVALID_TOOL_CALL_PATTERNS, THINKING_TAGS, split_raw_text
from .chat import ChatReply, ChatRequest, PromptRejected, new_prompt_tokens
from .dataset import GymRow
from .environment import LocalEnvironment, RolloutResponse, Tool, ToolError, Verdict
from .penalties import RAW_REWARD
from .tool_calls import MalformedToolCall, ToolCall, parse_tool_calls, without_tool_calls
from .trajectory import FailureKind, RolloutFailure, StopReason, Trajectory, Turn

_log = logging.getLogger(__name__)

_OWN_METRICS = ("turns", "tool_calls", "tool_errors", "truncated", RAW_REWARD)
_ECHO_LIMIT = 200


class Episode:
    """The state of one rollout. ``outcome`` is ``None`` until it has ended.

    Every exception of the environment's code ends this rollout, and no other, as a data failure.
    """

    def __init__(
        self,
        row: GymRow,
        environment: LocalEnvironment,
        *,
        group_id: str,
        rollout_id: str,
        seed_of_turn: Callable[[int], int | None],
        max_new_tokens: int,
        greedy: bool,
    ) -> None:
        self.outcome: Trajectory | RolloutFailure | None = None
        self._row = row
        self._environment = environment
        self._group_id = group_id
        self._rollout_id = rollout_id
        self._seed_of_turn = seed_of_turn
        self._max_new_tokens = max_new_tokens
        self._greedy = greedy
        self._messages: list[dict[str, str]] = []
        self._tools: dict[str, Tool] = {}
        self._seen: tuple[int, ...] = ()
        self._turns: list[Turn] = []
        self._weight_versions: list[int] = []
        self._text = ""
        self._tool_calls = 0
        self._tool_errors = 0
        try:
            self._messages = environment.opening(row)
            self._tools = environment.offered_tools(row)
        except Exception as error:
            self._fail(FailureKind.DATA, "the row", error)

    def request(self) -> ChatRequest:
        """The next model call."""
        return ChatRequest(
            messages=tuple(dict(message) for message in self._messages),
            max_new_tokens=self._max_new_tokens,
            prefix_token_ids=self._seen,
            seed=self._seed_of_turn(self._turn),
            greedy=self._greedy,
            tools=tuple(tool.schema() for tool in self._tools.values()),
        )

    def take(self, reply: ChatReply | PromptRejected) -> None:
        """Advance by one reply: end the rollout, or append the tools' answers for the next turn."""
        if isinstance(reply, PromptRejected):
            self._take_rejection(reply)
            return
        try:
            new = new_prompt_tokens(self._seen, reply.prompt_token_ids, turn=self._turn)
            turn = Turn(
                new,
                tuple(reply.generation_token_ids),
                tuple(reply.generation_logprobs),
                **self._faults_of_form(reply.text),
            )
        except Exception as error:
            self._fail(FailureKind.DATA, "the model's reply", error)
            return
        if reply.stop_reason is StopReason.ABORTED:
            self.fail(
                FailureKind.INFRA, f"the engine aborted turn {self._turn}; nothing is known of its answer"
            )
            return
        self._turns.append(turn)
        self._seen += turn.prompt_token_ids + turn.generation_token_ids
        self._weight_versions += reply.weight_versions
        self._text = reply.text
        self._messages.append({"role": "assistant", "content": reply.text})
        if reply.stop_reason is StopReason.LENGTH or not self._tools:
            self._finish(reply.stop_reason)
            return
        calls = parse_tool_calls(reply.text)
        self._tool_calls += len(calls)
        if not calls:
            self._finish(StopReason.STOP)
        elif len(self._turns) >= self._environment.max_turns:
            self._finish(StopReason.TOOL_LIMIT)
        else:
            self._serve(calls)

    def fail(self, kind: FailureKind, error: str) -> None:
        """End the rollout without a sample."""
        self.outcome = RolloutFailure(
            self._group_id,
            self._rollout_id,
            self._environment.name,
            kind,
            f"environment {self._environment.name!r}, row {self._row.row_id!r}: {error}",
        )

    @property
    def _turn(self) -> int:
        return len(self._turns) + 1

    def _fail(self, kind: FailureKind, culprit: str, error: Exception) -> None:
        _log.debug("rollout %s failed in %s", self._rollout_id, culprit, exc_info=error)
        self.fail(kind, f"{culprit}: {type(error).__name__}: {error}")

    def _faults_of_form(self, text: str) -> dict[str, bool]:
        """As for an answer through Gym, where a model server has taken thinking and calls out of the text."""
        said = split_raw_text(text)
        if self._tools:
            said = replace(said, answer=without_tool_calls(said.answer))
        return {
            "invalid_tool_call": said.has_invalid_tool_call(INVALID_TOOL_CALL_PATTERNS),
            "malformed_thinking": said.has_malformed_thinking(THINKING_TAGS),
        }

    def _take_rejection(self, rejection: PromptRejected) -> None:
        if self._turns:
            self._finish(StopReason.LENGTH)
        else:
            self.fail(FailureKind.DATA, f"the prompt leaves no room for an answer: {rejection.reason}")

    def _serve(self, calls: tuple[ToolCall | MalformedToolCall, ...]) -> None:
        for call in calls:
            name = call.name if isinstance(call, ToolCall) and call.name in self._tools else "error"
            try:
                content = self._answer(call)
            except ToolError as error:
                self._tool_errors += 1
                content = f"Error: {_shortened(str(error))}"
            except Exception as error:
                self._fail(FailureKind.DATA, f"tool {name!r}", error)
                return
            self._messages.append({"role": "tool", "name": name, "content": _encodable(content)})

    def _answer(self, call: ToolCall | MalformedToolCall) -> str:
        if isinstance(call, MalformedToolCall):
            raise ToolError(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; the tools are: {', '.join(self._tools)}")
        return tool.call(call.arguments)

    def _finish(self, stop_reason: StopReason) -> None:
        response = RolloutResponse(
            self._text, tuple(dict(message) for message in self._messages), stop_reason
        )
        try:
            # A verifier gets a copy: one that changes its row must not change it for the siblings.
            judged = self._environment.verify(copy.deepcopy(self._row), response)
            verdict = judged if isinstance(judged, Verdict) else Verdict(judged)
            reward, components = _checked_reward(verdict)
            self.outcome = Trajectory(
                turns=tuple(self._turns),
                reward=reward,
                stop_reason=stop_reason,
                group_id=self._group_id,
                rollout_id=self._rollout_id,
                agent=self._environment.name,
                weight_versions=tuple(self._weight_versions),
                reward_components=components,
                metrics={
                    "turns": float(len(self._turns)),
                    "tool_calls": float(self._tool_calls),
                    "tool_errors": float(self._tool_errors),
                    "truncated": float(stop_reason.truncated),
                    **_checked_metrics(verdict.metrics),
                },
                text=self._text,
            )
        except Exception as error:
            self._fail(FailureKind.DATA, "verify", error)


def _checked_reward(verdict: Verdict) -> tuple[float | None, dict[str, float]]:
    """Reward and components under the rules that an answer of Gym has to keep, too."""
    return read_reward(
        {
            "reward": _plain(verdict.reward),
            "reward_components": {name: _plain(value) for name, value in verdict.components.items()},
        }
    )


def _plain(value: Any) -> Any:
    """Numbers of other libraries as floats; a boolean stays one, and is no reward."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _checked_metrics(values: Mapping[str, float]) -> dict[str, float]:
    for name, value in values.items():
        if name in _OWN_METRICS:
            raise ValueError(f"metric {name!r} is one that the bridge reports itself; use another name")
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"metric {name!r} is {value!r}, not a finite number")
    return {name: float(value) for name, value in values.items()}


def _shortened(text: str) -> str:
    return text if len(text) <= _ECHO_LIMIT else text[: _ECHO_LIMIT - 1] + "…"


def _encodable(text: str) -> str:
    """``text`` with half characters spelled out: a tokenizer must be able to encode whatever a tool says."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
