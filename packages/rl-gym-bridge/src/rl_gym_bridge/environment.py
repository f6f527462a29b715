"""What an in-process environment is: a verifier function and, if it wants, tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat import Message
from .dataset import GymRow
from .errors import DatasetError
from .trajectory import StopReason


class ToolError(Exception):
    """Raised by a tool's function for input that it cannot serve: the policy gets the text and goes on."""


class EnvironmentDefinitionError(ValueError):
    """An environment or tool that contradicts itself, or a name that no environment has."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        name: what the policy calls it.
        description: for the chat template.
        parameters: JSON schema of the arguments, for the chat template (it is not enforced: the
            function checks its own input).
        function: called with the arguments by name; returns the text that the policy sees. Arguments
            that do not fit its signature, and :class:`ToolError`, become an error message for the
            policy; any other exception is a fault of the environment and fails the rollout.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., str]

    def schema(self) -> dict[str, Any]:
        """The tool as a chat template expects it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The tool's answer.

        Raises:
            ToolError: the policy's input is at fault.
            TypeError: the function returned something that is not text.
        """
        try:
            bound = inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            raise ToolError(f"wrong arguments for {self.name}: {error}") from error
        answer = self.function(*bound.args, **bound.kwargs)
        if not isinstance(answer, str):
            raise TypeError(f"tool {self.name!r} returned a {type(answer).__name__}; a tool returns text")
        return answer


@dataclass(frozen=True, slots=True)
class RolloutResponse:
    """A finished rollout, as its verifier sees it.

    Attributes:
        text: the final answer, thinking included, uncut.
        messages: the whole conversation: system prompt, prompt, answers and tool messages.
        stop_reason: why it ended: ``STOP``, ``LENGTH`` or ``TOOL_LIMIT``.
    """

    text: str
    messages: tuple[Message, ...]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement.

    Attributes:
        reward: ``None`` when there is none: the rollout is then neither in a baseline nor trained. A number
            within ±1e6 otherwise; ``True`` and ``False`` are none.
        components: named parts of the reward, which sum to it; none without a reward.
        metrics: numbers worth plotting.
    """

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


Verifier = Callable[[GymRow, RolloutResponse], "float | Verdict | None"]


@dataclass(frozen=True, slots=True)
class LocalEnvironment:
    """An environment that runs inside the trainer's process.

    Attributes:
        name: what rows call it in ``agent_ref.name``.
        verify: judges a finished rollout. An exception in it makes the rollout a data failure, never
            a reward. It runs inline without a deadline, so it must be quick and must not block.
        tools: what the policy may call.
        max_turns: model calls at most; a tool call in the last of them is not served and ends the
            rollout with ``StopReason.TOOL_LIMIT``.
        system_prompt: put before the prompt of rows that bring no system message.
        check_row: raises :class:`DatasetError` for a row that ``verify`` could not judge.

    Raises:
        EnvironmentDefinitionError: two tools of one name, tools without a second turn to use their
            answer in, or several turns without tools.
    """

    name: str
    verify: Verifier
    tools: Sequence[Tool] = ()
    max_turns: int = 1
    system_prompt: str | None = None
    check_row: Callable[[GymRow], object] | None = None

    def opening(self, row: GymRow) -> list[dict[str, str]]:
        """The messages that a rollout of the row starts from, the system prompt included.

        Raises:
            DatasetError: the row's input holds something that is not text.
        """
        messages = [dict(message) for message in row.messages]
        if self.system_prompt is not None and not any(m["role"] == "system" for m in messages):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def offered_tools(self, row: GymRow) -> dict[str, Tool]:
        """The environment's tools by name, or, where the row lists tools, those of them that it lists.

        Raises:
            DatasetError: the row lists a tool that the environment does not have.
        """
        tools = {tool.name: tool for tool in self.tools}
        listed = row.responses_create_params.get("tools")
        if listed is None:
            return tools
        offered: dict[str, Tool] = {}
        for item in listed:
            name = item.get("name") if isinstance(item, Mapping) else None
            if not isinstance(name, str) or name not in tools:
                raise DatasetError(
                    f"it offers {name!r}, which the environment does not have",
                    field="responses_create_params.tools",
                    remedy=f"offer some of: {', '.join(tools) or 'no tools'}",
                )
            offered[name] = tools[name]
        return offered

    def check(self, row: GymRow) -> None:
        """Refuse a row that this environment could not play, before anything is sampled for it.

        Raises:
            DatasetError: what the row lacks.
        """
        self.opening(row)
        self.offered_tools(row)
        if self.check_row is not None:
            self.check_row(row)

    def __post_init__(self) -> None:
        if not self.name:
            raise EnvironmentDefinitionError("an environment needs a name; rows refer to it by that")
        if self.max_turns < 1:
            raise EnvironmentDefinitionError(
                f"environment {self.name!r}: max_turns must be >= 1, got {self.max_turns}"
            )
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise EnvironmentDefinitionError(f"environment {self.name!r} has two tools named {name!r}")
        if names and self.max_turns < 2:
            raise EnvironmentDefinitionError(
                f"environment {self.name!r} has tools but max_turns={self.max_turns}: the policy could never "
                f"see a tool's answer; use max_turns >= 2"
            )
        if not names and self.max_turns > 1:
            raise EnvironmentDefinitionError(
                f"environment {self.name!r} has max_turns={self.max_turns} but no tool, and only a tool call "
                f"starts another turn; add tools or use max_turns=1"
            )
        object.__setattr__(self, "tools", tuple(self.tools))
