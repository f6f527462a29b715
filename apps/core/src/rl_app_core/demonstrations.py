"""Demonstrations for the supervised warm start, written by rules from a row's own data.

Each maker knows a long way and a short one. The long way reaches the right answer by steps that a
small model can learn; the short way states the answer at once, which it cannot. A policy that was
shown mostly the short way last starts out wrong, and can find the long way by reinforcement.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from rl_gym_bridge.dataset import GymRow
from rl_gym_bridge.environment import LocalEnvironment
from rl_gym_bridge.environments.calculator import CALCULATOR_TOOL_NAME
from rl_gym_bridge.tool_calls import render_tool_call

from .config.errors import ConfigError
from .conversation import ConversationTokenizer, Message

Reply = Callable[[GymRow], Sequence[Message]]


def demonstrate(
    maker: str,
    row: GymRow,
    environment: LocalEnvironment | None,
    share: float,
    rng: random.Random,
    conversation: ConversationTokenizer,
) -> tuple[list[int], list[int]]:
    """Token ids of one demonstration and a mask with 1 on what the assistant says.

    Args:
        maker: a key of :data:`MAKERS`.
        row: the problem.
        environment: the one that will play the row; the demonstration opens as its rollouts do. ``None`` is
            an agent of a Gym, which shows the policy the row's own messages.
        share: probability of the long way.
        rng: decides.
        conversation: the tokenizer.
    """
    long_way, short_way = MAKERS[maker]
    reply = long_way(row) if rng.random() < share else short_way(row)
    if environment is None:
        messages: list[Message] = list(row.messages)
        tools: list[dict[str, Any]] = []
    else:
        messages = list(environment.opening(row))
        tools = [tool.schema() for tool in environment.offered_tools(row).values()]
    ids: list[int] = list(conversation.prompt(messages, tools))
    mask = [0] * len(ids)
    for position, message in enumerate(reply):
        messages.append(message)
        if message["role"] != "assistant":
            continue
        if position:
            between = conversation.continuation(messages[:-1], ids[-1])
            ids += between
            mask += [0] * len(between)
        said = conversation.answer(message["content"])
        ids += said
        mask += [1] * len(said)
    return ids, mask


def check_maker(maker: str, rows: Iterable[GymRow], *, tools: bool = True) -> None:
    """Refuse a maker that does not exist or cannot demonstrate one of the rows.

    Args:
        maker: a key of :data:`MAKERS`.
        rows: the problems.
        tools: whether rows may offer tools: how an agent of a Gym shows them is not known here.

    Raises:
        ConfigError: as said, with the remedy.
    """
    if maker not in MAKERS:
        close = get_close_matches(maker, MAKERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(MAKERS)}"
        raise ConfigError(f"warm_start.demonstrations={maker!r} does not exist; {hint}")
    for row in rows:
        try:
            if not tools and row.responses_create_params.get("tools"):
                raise ValueError("it offers tools, which its agent shows in a way of its own")
            _ = row.messages
            for way in MAKERS[maker]:
                way(row)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"warm_start.demonstrations={maker}: cannot demonstrate row {row.row_id}: {error}; "
                "set warm_start.steps=0 or use rows that it knows"
            ) from error


def tokenizer_texts() -> list[str]:
    """Words that the recipes' conversations consist of: what a tokenizer made on the spot learns from."""
    call = render_tool_call(CALCULATOR_TOOL_NAME, {"expression": ""})
    return ["user\nassistant\nsystem\ntool\n", "Calculate  .", "What is  ?", call, call, call]


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _answer_at_once(row: GymRow) -> Sequence[Message]:
    return [_say(str(row.verifier["answer"]))]


def _terms(row: GymRow) -> tuple[str, str, str]:
    metadata: Mapping[str, Any] = row.verifier["metadata"]
    match = re.fullmatch(r"(\d+) ?([-+*]) ?(\d+)", str(metadata["expression"]))
    if match is None:
        raise ValueError(f"its expression {metadata['expression']!r} is not two numbers and one of + - *")
    return match[1], match[2], match[3]


def _think_by_digits(row: GymRow) -> Sequence[Message]:
    left, operator, right = _terms(row)
    if operator != "+":
        raise ValueError(f"its operator is {operator}, only additions are thought through")
    width = max(len(left), len(right))
    carry = 0
    steps: list[str] = []
    for a, b in zip(reversed(left.zfill(width)), reversed(right.zfill(width)), strict=True):
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return [_say(f"<think>{','.join(steps)}</think>{row.verifier['answer']}")]


def _call_the_calculator(row: GymRow) -> Sequence[Message]:
    left, operator, right = _terms(row)
    call = render_tool_call(CALCULATOR_TOOL_NAME, {"expression": f"{left}{operator}{right}"})
    answer = str(row.verifier["answer"])
    return [
        _say(call),
        {"role": "tool", "name": CALCULATOR_TOOL_NAME, "content": answer},
        _say(answer),
    ]


MAKERS: Mapping[str, tuple[Reply, Reply]] = {
    "addition": (_think_by_digits, _answer_at_once),
    "calculator": (_call_the_calculator, _answer_at_once),
}
