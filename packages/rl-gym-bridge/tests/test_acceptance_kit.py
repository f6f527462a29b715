"""The parts of the acceptance kit that need no Gym: findings, pins, and what a rollout has to show."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rl_gym_bridge.testing import (
    ByteTokenizer,
    CaseError,
    CaseReport,
    Finding,
    RowPin,
    ScriptedModelServer,
    ScriptedToolCall,
    ScriptedTurn,
    gym_cases,
)
from rl_gym_bridge.testing.chat_template import TemplateError
from rl_gym_bridge.testing.expectation import expected_calls
from rl_gym_bridge.testing.findings import MISSING, at, lost
from rl_gym_bridge.testing.gym_settings import acceptance_gym_config
from rl_gym_bridge.testing.responses_input import chat_messages, chat_tools, plain

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize(
    ("expected", "got", "where"),
    [
        ([1, 2, 3], [1, 2, 4], ("[2]: 3", "[2]: 4")),
        ((1, 2), [1], ("[1]: 2", "[1]: nothing")),
        ([1], [1, 9], ("[1]: nothing", "[1]: 9")),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ("a.b: 1", "a.b: 2")),
        ({"a": 1}, {"a": 1, "c": 2}, ("c: nothing", "c: 2")),
        ("x", "y", ('"x"', '"y"')),
        (1.0, True, ("1.0", "true")),
        (0, None, ("0", "null")),
        ("a" * 300 + "b", "a" * 300 + "c", ('[character 300]: "b"', '[character 300]: "c"')),
    ],
)
def test_a_difference_is_named_where_it_is(expected: Any, got: Any, where: tuple[str, str]) -> None:
    finding = Finding.equal("it", expected, got)
    assert (finding.passed, finding.expected, finding.got) == (False, *where)


@pytest.mark.parametrize(("one", "other"), [((1, 2), [1, 2]), (1, 1.0), ({"a": [0.5]}, {"a": (0.5,)})])
def test_equal_values_pass(one: Any, other: Any) -> None:
    assert Finding.equal("it", one, other).passed


def test_a_report_is_readable_and_an_empty_one_fails() -> None:
    report = CaseReport("mcqa/accepted", (Finding.equal("a", 1, 1), Finding.equal("b", 1, 2)), 1.25)
    assert str(report) == (
        "mcqa/accepted: FAILED, 2 findings, 1.2 s\n    WRONG b\n        expected 1\n        got      2"
    )
    assert not CaseReport("nothing", ()).passed


@pytest.mark.parametrize(
    ("echoed", "problem"),
    [
        ({"a": [{"b": 1, "added": None}], "n": None, "added": 1}, ""),
        ({"a": [{"b": 1}]}, ""),
        ({"a": [{"b": 2}]}, "a.0.b is 2, it was 1"),
        ({"a": [{}]}, "a.0.b is missing, it was 1"),
        ({"a": []}, "a has 0 entries, it had 1"),
        ({}, 'a is missing, it was [{"b": 1}]'),
        ({"a": [{"b": True}]}, "a.0.b is true, it was 1"),
    ],
)
def test_what_is_lost_is_named(echoed: Any, problem: str) -> None:
    assert lost({"a": [{"b": 1}], "n": None}, echoed) == problem


def test_values_are_found_by_path() -> None:
    document = {"a": [{"b": 0}], "c": "text"}
    assert at(document, "a.0.b") == 0
    assert [at(document, path) for path in ("a.1", "a.b", "c.0", "d", "a.0.b.c")] == [MISSING] * 5


def test_a_row_is_read_only_if_it_is_the_pinned_one(tmp_path: Path) -> None:
    line = b'{"x": "\xc3\xbc"}'
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n" + line + b"\n[]\n")
    digest = hashlib.sha256(line).hexdigest()
    assert RowPin("rows.jsonl", 1, digest).read(tmp_path) == {"x": "ü"}
    for pin, problem in (
        (RowPin("rows.jsonl", 0, digest), "has SHA-256"),
        (RowPin("rows.jsonl", 9, digest), "has no line 9"),
        (RowPin("gone.jsonl", 0, digest), "has no line 0"),
    ):
        with pytest.raises(CaseError, match=f"{problem}.*review the row and its goldens"):
            pin.read(tmp_path)
    with pytest.raises(CaseError, match="is no JSON object"):
        RowPin("rows.jsonl", 2, hashlib.sha256(b"[]").hexdigest()).read(tmp_path)


PARAMS = {
    "input": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "Hi."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well?"}]},
        {"role": "user", "content": "Go on."},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": {}, "strict": True}],
}


def test_input_items_become_the_messages_that_gym_makes_of_them() -> None:
    assert plain(chat_messages(PARAMS)) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Look.",
            "tool_calls": [["c1", "look", "{}"]],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Well?"},
        {"role": "user", "content": "Go on."},
    ]
    assert chat_tools(PARAMS) == [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert chat_messages({"input": "Hi."}) == [{"role": "user", "content": "Hi."}]
    with pytest.raises(TemplateError, match="item_reference"):
        chat_messages({"input": [{"type": "item_reference", "id": "x"}]})


def test_expected_calls_are_what_the_server_makes() -> None:
    """Two ways to the same tokens: from row and script, and from the requests of a conversation."""
    import httpx

    turns = (
        ScriptedTurn(
            reasoning_content="Hm.",
            tool_calls=(ScriptedToolCall("look", {"at": 1}), ScriptedToolCall("look", {"at": 2})),
        ),
        ScriptedTurn(content="Done."),
    )
    expected = expected_calls(PARAMS, turns, [("one", "two")], max_tokens=500)
    messages = chat_messages(PARAMS)
    with ScriptedModelServer({"x": turns}) as server, server.running("x"):
        for call in expected:
            body = {"messages": messages, "tools": chat_tools(PARAMS), "logprobs": True, "max_tokens": 500}
            answer = httpx.post(
                f"{server.base_url}/chat/completions", json=body, trust_env=False, verify=False
            ).json()
            message = answer["choices"][0]["message"]
            assert tuple(message["prompt_token_ids"]) == call.prompt_token_ids
            assert tuple(message["generation_token_ids"]) == call.generation_token_ids
            assert tuple(message["generation_log_probs"]) == call.generation_log_probs
            assert plain(messages) == plain(call.messages)
            outputs = [("call-0-0", "one"), ("call-0-1", "two")]
            tools = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in outputs]
            messages = [*messages, message, *tools]


def test_outputs_have_to_fit_the_calls() -> None:
    turns = (ScriptedTurn(tool_calls=(ScriptedToolCall("look", {}),)), ScriptedTurn(content="Done."))
    with pytest.raises(ValueError, match="turn 0 makes 1 tool calls and 0 outputs are given"):
        expected_calls(PARAMS, turns)


def test_there_are_seven_environments_each_accepted_and_rejected() -> None:
    cases = gym_cases()
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) == 14
    by_environment: dict[str, list[float]] = {}
    for case in cases:
        by_environment.setdefault(case.environment, []).append(case.reward)
        assert case.name.startswith(f"{case.environment}/")
        assert len(case.tool_outputs) in (0, len(case.turns))
    assert all(rewards == [1.0, 0.0] for rewards in by_environment.values())
    assert len(by_environment) == 7


def test_the_settings_start_what_the_cases_need() -> None:
    cases = [case for case in gym_cases() if case.environment in ("mcqa", "math_with_judge")]
    config = acceptance_gym_config(cases, judge_model="j")
    assert len(config["config_paths"]) == 3
    assert config["judge_model"]["responses_api_models"]["vllm_model"]["model"] == "j"
    assert "math_with_judge" in config
    assert "equivalence_llm_judge" not in config
    assert json.loads(json.dumps(config)) == config
