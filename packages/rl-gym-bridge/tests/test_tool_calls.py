from __future__ import annotations

import random
import sys

import pytest

from rl_gym_bridge.tool_calls import (
    MalformedToolCall,
    ToolCall,
    parse_tool_calls,
    render_tool_call,
    visible_text,
)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_well_formed_call() -> None:
    text = call('{"name": "calculator", "arguments": {"expression": "37*82"}}')
    assert parse_tool_calls(text) == (ToolCall("calculator", {"expression": "37*82"}),)


def test_rendered_calls_are_read_back() -> None:
    arguments = {"text": 'quotes " and\nlines, ü', "n": 3, "deep": {"list": [1, None]}}
    assert parse_tool_calls(render_tool_call("f", arguments)) == (ToolCall("f", arguments),)


def test_the_rendered_form_is_the_one_that_demonstrations_teach() -> None:
    assert (
        render_tool_call("calculator", {"expression": "37*82"})
        == '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*82"}}\n</tool_call>'
    )


def test_several_calls_keep_their_order_and_text_between_is_ignored() -> None:
    first, second = (call(f'{{"name": "{name}", "arguments": {{}}}}') for name in "ab")
    text = f"first {first} then {second} done"
    assert [c.name for c in parse_tool_calls(text) if isinstance(c, ToolCall)] == ["a", "b"]


@pytest.mark.parametrize("text", ["", "no call", "</tool_call>", "<tool call>", "42"])
def test_text_without_an_opening_tag_has_no_call(text: str) -> None:
    assert parse_tool_calls(text) == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (call("{"), "not valid JSON"),
        (call(""), "not valid JSON"),
        (call('{"name": "a", "arguments": {"x": NaN}}'), "NaN"),
        (call('{"name": "a", "name": "b", "arguments": {}}'), "'name' appears twice"),
        (call('{"name": "a", "arguments": {"x": "\\ud800"}}'), "surrogate"),
        (call('{"name": "a", "arguments": {"x": 1e999}}'), "too large"),
        (call("[" * 100_000), "JSON"),
        (call("[1]"), "not an object"),
        (call('{"arguments": {}}'), '"name"'),
        (call('{"name": "", "arguments": {}}'), '"name"'),
        (call('{"name": 3, "arguments": {}}'), '"name"'),
        (call('{"name": "a"}'), '"arguments"'),
        (call('{"name": "a", "arguments": "{}"}'), '"arguments"'),
        (call('{"name": "a", "arguments": {}, "id": 1}'), "id"),
        ('<tool_call>\n{"name": "a", "arguments": {}}', "no </tool_call>"),
        ("<tool_call>", "no </tool_call>"),
    ],
)
def test_a_malformed_call_is_a_result_that_says_what_is_wrong(text: str, problem: str) -> None:
    (result,) = parse_tool_calls(text)
    assert isinstance(result, MalformedToolCall)
    assert problem in result.problem


def test_a_number_beyond_the_interpreters_limit_is_malformed() -> None:
    digits = sys.get_int_max_str_digits() + 1
    (result,) = parse_tool_calls(call('{"name": "a", "arguments": {"x": ' + "9" * digits + "}}"))
    assert isinstance(result, MalformedToolCall)


def test_an_unclosed_call_does_not_swallow_the_next_one() -> None:
    good = call('{"name": "a", "arguments": {}}')
    first, second = parse_tool_calls("<tool_call>\n{ " + good)
    assert isinstance(first, MalformedToolCall)
    assert second == ToolCall("a", {})


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b</think>c", "c"),
        ("a<think>b", "a"),
        ("a", "a"),
        ("<think>a</think>b<think>c", "b"),
    ],
)
def test_visible_text_is_what_stands_outside_the_thinking(text: str, visible: str) -> None:
    assert visible_text(text) == visible


def test_a_call_that_is_only_thought_of_is_not_made() -> None:
    considered = call('{"name": "a", "arguments": {}}')
    assert parse_tool_calls(f"<think>maybe {considered}</think>no") == ()
    assert parse_tool_calls(f"<think>maybe {considered}") == ()
    assert parse_tool_calls(f"<think>yes</think>{considered}") == (ToolCall("a", {}),)


def test_no_text_makes_the_parser_raise() -> None:
    draw = random.Random(0)
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "{", "}", "[", ":", ","]
    pieces += ['"name"', '"a"', '"arguments"', "\\ud800", "\x00", "ü", "1e999", "-Infinity"]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randrange(14)))
        assert isinstance(parse_tool_calls(text), tuple)
