"""Splicing, parsing and settings of the servers, each by itself."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from rl_generation.failures import ContextOverflowError, InvalidRequestError, NotReadyError
from rl_generation.server.parsing import CalledTool, PlainParser, TaggedParser
from rl_generation.server.refusals import UnauthorizedError, refusal_of
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_generation.server.splice import CarriedTokens, carried_tokens, spliced_prompt

USER = {"role": "user", "content": "u"}
CARRYING = {"role": "assistant", "content": "a", "prompt_token_ids": [1], "generation_token_ids": [2]}


def encode(text: str) -> list[int]:
    """One token per character, of numbers that no test uses otherwise."""
    return [1000 + ord(character) for character in text]


def said(tokens: list[int]) -> str:
    return "".join(chr(token - 1000) for token in tokens)


def splice(messages: list[dict[str, Any]], template: Any) -> list[int]:
    async def render(conversation: list[dict[str, Any]], with_header: bool) -> str:
        return template(conversation) + ("A:" if with_header else "")

    carried = carried_tokens(messages)
    assert carried is not None
    return asyncio.run(spliced_prompt(messages, carried, render, encode))


def plainly(messages: list[dict[str, Any]]) -> str:
    return "".join(f"{m['role'][0].upper()}:{m['content']};" for m in messages)


def test_only_what_the_template_puts_behind_is_tokenised() -> None:
    assert said(splice([USER, CARRYING, {"role": "user", "content": "v"}], plainly)[2:]) == ";U:v;A:"


def test_an_end_that_was_sampled_is_used() -> None:
    ended = {**CARRYING, "generation_token_ids": [2, *encode(";")]}
    assert said(splice([USER, ended, USER], plainly)[2:]) == ";U:u;A:"


def test_what_is_sampled_may_be_anything() -> None:
    """Text that looks like the template's own, or like the marker, changes nothing."""
    for content in (";A:", "\u241f0\u241f", "", None):
        messages = [
            {"role": "user", "content": "\u241f1\u241f"},
            {**CARRYING, "content": content},
            {"role": "user", "content": "\u241f0\u241f"},
        ]
        assert said(splice(messages, plainly)[2:]) == ";U:\u241f0\u241f;A:"


def test_a_template_that_rewrites_earlier_turns_does_no_harm() -> None:
    """As those that drop thinking from all turns but the last."""

    def forgetful(messages: list[dict[str, Any]]) -> str:
        last = len(messages) - 1
        shown = [
            m if i == last else {**m, "content": m["content"].split("</t>")[-1]}
            for i, m in enumerate(messages)
        ]
        return plainly(shown)

    thinking = {**CARRYING, "content": "<t>hm</t>yes"}
    assert said(splice([USER, thinking, USER], forgetful)[2:]) == ";U:u;A:"


def test_a_template_that_wants_a_call_before_its_output_gets_one() -> None:
    def strict(messages: list[dict[str, Any]]) -> str:
        text = ""
        for before, message in zip([None, *messages], messages, strict=False):
            if message["role"] == "tool" and not (
                before and (before.get("tool_calls") or before["role"] == "tool")
            ):
                raise InvalidRequestError("a tool message needs a call")
            calls = "".join(
                f"[{c['function']['name']}{c['function']['arguments']}]"
                for c in message.get("tool_calls", ())
            )
            text += f"{message['role'][0].upper()}:{message['content']}{calls};"
        return text

    call = {"id": "1", "function": {"name": "add", "arguments": ";broken"}}
    messages = [USER, {**CARRYING, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert said(splice(messages, strict)[2:]) == ";T:3;A:"


def test_a_template_that_changes_what_was_said_is_refused() -> None:
    def shouting(messages: list[dict[str, Any]]) -> str:
        return "".join(f"{m['content'][:1]};" for m in messages)

    with pytest.raises(InvalidRequestError, match="template"):
        splice([USER, CARRYING, USER], shouting)


def test_tokens_belong_to_whole_answers() -> None:
    assert carried_tokens([USER]) is None
    assert carried_tokens([USER, CARRYING, USER]) == CarriedTokens(1, (1, 2))
    later = {**CARRYING, "prompt_token_ids": [1, 2, 3]}
    assert carried_tokens([USER, CARRYING, USER, later]) == CarriedTokens(3, (1, 2, 3, 2))
    assert carried_tokens([USER, {"role": "assistant", "content": "a"}], [7]) == CarriedTokens(1, (7,))


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "problems"),
    [
        ("plain", "plain", None, 0, 0),
        ("", None, None, 0, 0),
        ("<think>a</think>b", "b", "a", 0, 0),
        ("opened in the prompt</think>b", "b", "opened in the prompt", 0, 0),
        ("<think>cut off", None, "cut off", 0, 0),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', None, None, 1, 0),
        ('x<tool_call>\n{"name": "f"}\n</tool_call>', "x", None, 1, 0),
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", None, 0, 1),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', None, 0, 1),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', None, 0, 1),
        (
            '<tool_call>{"name": "f", "arguments": []}</tool_call>',
            '<tool_call>{"name": "f", "arguments": []}</tool_call>',
            None,
            0,
            1,
        ),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', None, 0, 1),
        ('<tool_call>{<tool_call>{"name": "f"}</tool_call>', "<tool_call>{", None, 1, 1),
        (
            "<tool_call>" + "[" * 100_000 + "</tool_call>",
            "<tool_call>" + "[" * 100_000 + "</tool_call>",
            None,
            0,
            1,
        ),
        ("stray</tool_call>", "stray</tool_call>", None, 0, 0),
    ],
)
def test_tagged_text(
    text: str, content: str | None, reasoning: str | None, calls: int, problems: int
) -> None:
    parsed = TaggedParser().parse(text, with_tools=True)
    assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert (len(parsed.tool_calls), len(parsed.problems)) == (calls, problems)


def test_parsers_leave_alone_what_they_are_not_asked_for() -> None:
    text = '<think>a</think><tool_call>{"name": "f", "arguments": {"x": "\u00e4"}}</tool_call>'
    assert PlainParser().parse(text, with_tools=True).content == text
    assert TaggedParser(tool_calls=False, reasoning=False).parse(text, with_tools=True).content == text
    (call,) = TaggedParser().parse(text, with_tools=True).tool_calls
    assert call == CalledTool("f", '{"x": "\u00e4"}')


@pytest.mark.parametrize(
    "settings",
    [
        {"profiles": ()},
        {"max_context": 0},
        {"vocab_size": 0},
        {"max_new_tokens": 0},
        {"request_timeout_s": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        ServerSettings(**{"model": "m", "max_context": 8, "vocab_size": 8, **settings})
    with pytest.raises(ValueError, match="top_p"):
        SamplingProfile(top_p=0.0)


def test_refusals_carry_what_clients_go_by() -> None:
    full = refusal_of(ContextOverflowError("server", 698, 512))
    assert full.status == 400
    assert {"698", "512"} <= set(full.document["error"]["message"].replace(",", "").split())
    assert refusal_of(NotReadyError("r0: loads")).headers["retry-after"] == "1"
    assert refusal_of(UnauthorizedError("no")).headers["www-authenticate"] == "Bearer"
    unknown = refusal_of(OSError("/secret/path"))
    assert (unknown.status, "secret" in str(unknown.document)) == (500, False)


def test_errors_survive_the_way_between_processes() -> None:
    for error in (InvalidRequestError("bad", "top_p"), InvalidRequestError("bad"), UnauthorizedError("no")):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back)) == (type(error), str(error))
        assert getattr(back, "parameter", None) == getattr(error, "parameter", None)
