"""The scripted model server, asked over HTTP."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rl_gym_bridge.postprocess import postprocess_nemo_gym_result
from rl_gym_bridge.testing import (
    CASE_KEY,
    ByteTokenizer,
    CallKind,
    ScriptedModelServer,
    ScriptedToolCall,
    ScriptedTurn,
    ScriptError,
    turns_from,
)
from rl_gym_bridge.testing.chat_template import logprob

TOKENIZER = ByteTokenizer()
USER = {"role": "user", "content": "hi"}
TOKENS = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
SEARCH = ScriptedTurn(
    reasoning_content="look", tool_calls=(ScriptedToolCall("search", {"query": "ü"}),), content="One moment."
)


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    scripts = {"greeting": [ScriptedTurn(content="hello")], "search": [SEARCH, ScriptedTurn(content="done")]}
    with ScriptedModelServer(scripts) as running:
        yield running


def post(server: ScriptedModelServer, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=10, trust_env=False, verify=False)


def chat(server: ScriptedModelServer, case: str, *messages: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"model": server.model, "messages": [*(messages or (USER,))], **TOKENS, **more}
    return post(server, "/v1/chat/completions", {**body, "metadata": {CASE_KEY: case}} if case else body)


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def test_an_answer_carries_its_exact_tokens(server: ScriptedModelServer) -> None:
    response = chat(server, "greeting")
    message = message_of(response)
    prompt = TOKENIZER.chat_prompt([USER])
    answer = [*TOKENIZER.encode("hello"), TOKENIZER.im_end_id]
    assert message["content"] == "hello"
    assert message["prompt_token_ids"] == prompt
    assert message["generation_token_ids"] == answer
    assert message["generation_log_probs"] == [
        logprob(len(prompt) + index, token) for index, token in enumerate(answer)
    ]
    choice = response.json()["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in answer]
    assert choice["finish_reason"] == "stop"
    assert response.json()["usage"]["total_tokens"] == len(prompt) + len(answer)


def test_log_probabilities_are_exact_and_tell_positions_and_tokens_apart() -> None:
    values = [logprob(position, token) for position in range(2000) for token in range(263)]
    assert all(-4 < value < 0 and (value * 512).is_integer() for value in values)
    assert logprob(5, 65) != logprob(6, 65) != logprob(6, 66)


def test_a_request_without_log_probabilities_gets_no_tokens(server: ScriptedModelServer) -> None:
    message = message_of(chat(server, "greeting", logprobs=False))
    assert not {"prompt_token_ids", "generation_token_ids", "generation_log_probs"} & set(message)


def test_style_logprobs_leaves_the_prompt_to_tokenize(server: ScriptedModelServer) -> None:
    server.style = "logprobs"
    response = chat(server, "greeting")
    assert "prompt_token_ids" not in message_of(response)
    assert response.json()["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ord('h')}"
    tokenized = post(server, "/tokenize", {"model": server.model, "messages": [USER]}).json()
    assert tokenized["tokens"] == TOKENIZER.chat_prompt([USER])
    assert tokenized["count"] == len(tokenized["tokens"])
    assert [call.kind for call in server.calls] == [CallKind.POLICY, CallKind.TOKENIZE]


def test_b5_the_next_prompt_is_the_tokens_so_far_whatever_the_history_says(
    server: ScriptedModelServer,
) -> None:
    first = message_of(chat(server, "search"))
    assert first["reasoning_content"] == "look"
    (call,) = first["tool_calls"]
    assert (call["id"], call["function"]) == ("call-0-0", {"name": "search", "arguments": '{"query": "ü"}'})
    tool = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
    changed = {**first, "content": "Something else."}
    second = message_of(chat(server, "search", USER, changed, tool))
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    new = [
        *TOKENIZER.encode("\n"),
        TOKENIZER.im_start_id,
        *TOKENIZER.encode("tool\nfound"),
        TOKENIZER.im_end_id,
        *TOKENIZER.encode("\n"),
        TOKENIZER.im_start_id,
        *TOKENIZER.encode("assistant\n"),
    ]
    assert second["prompt_token_ids"] == seen + new
    assert second["content"] == "done"
    assert [call.turn for call in server.calls_of(CallKind.POLICY, "search")] == [0, 1]


def test_b6_a_token_prompt_reaches_the_model_as_it_is_and_not_by_way_of_its_text(
    server: ScriptedModelServer,
) -> None:
    """B6: text that does not lead back to its tokens, from the first sampled token to the trajectory."""
    first = message_of(chat(server, "search"))
    # What an engine may sample: half a character, and a control token in the middle of the text.
    half = TOKENIZER.encode("ü")[:1]
    sampled = [*half, TOKENIZER.think_open_id, *TOKENIZER.encode("a"), TOKENIZER.im_end_id]
    assert TOKENIZER.encode(TOKENIZER.decode(sampled)) != sampled
    assert TOKENIZER.encode(TOKENIZER.decode(sampled, skip_control_tokens=False)) != sampled
    said = {
        "role": "assistant",
        "content": TOKENIZER.decode(sampled),
        "prompt_token_ids": first["prompt_token_ids"],
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }
    second = message_of(chat(server, "search", USER, said, USER))
    seen = first["prompt_token_ids"] + sampled
    prompt = list(server.calls[-1].prompt_token_ids)
    assert prompt[: len(seen)] == seen
    output = [{"type": "message", **said}, {"type": "message", **USER}, {"type": "message", **second}]
    trajectory = postprocess_nemo_gym_result({"response": {"output": output}, "reward": 1.0})
    assert list(trajectory.token_ids) == prompt + second["generation_token_ids"]
    assert trajectory.turns[0].generation_token_ids == tuple(sampled)


def test_a_history_without_tokens_is_rendered_to_the_same_ids(server: ScriptedModelServer) -> None:
    first = message_of(chat(server, "search"))
    tool = {"role": "tool", "tool_call_id": "call-0-0", "content": "found"}
    spliced = message_of(chat(server, "search", USER, first, tool))
    bare = {key: value for key, value in first.items() if not key.endswith(("_ids", "_probs"))}
    rendered = message_of(chat(server, "search", USER, bare, tool))
    assert rendered["prompt_token_ids"] == spliced["prompt_token_ids"]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"description": "b"}, True),
        ({"parameters": {"type": "object", "properties": {}}}, True),
        ({"description": "a"}, False),
    ],
)
def test_a_changed_tool_schema_changes_the_prompt(
    server: ScriptedModelServer, change: dict[str, Any], differs: bool
) -> None:
    def prompt(function: dict[str, Any]) -> list[int]:
        tools = [{"type": "function", "function": function}]
        return message_of(chat(server, "greeting", tools=tools))["prompt_token_ids"]

    plain = {"name": "search", "description": "a", "parameters": {}}
    assert (prompt(plain) != prompt({**plain, **change})) is differs


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    ("room", "content", "calls", "finish"),
    [
        (1, None, 0, "length"),
        (10, "One ", 0, "length"),
        (18, "One moment.", 0, "length"),
        (1000, "One moment.", 1, "tool_calls"),
    ],
)
def test_an_answer_is_cut_where_the_request_says(
    server: ScriptedModelServer, name: str, room: int, content: str | None, calls: int, finish: str
) -> None:
    response = chat(server, "search", **{name: room})
    message = message_of(response)
    assert message["content"] == content
    assert len(message.get("tool_calls", [])) == calls
    assert response.json()["choices"][0]["finish_reason"] == finish
    assert (len(message["generation_token_ids"]) == room) is (finish == "length")


def test_a_character_is_not_cut_in_its_middle() -> None:
    with ScriptedModelServer({"x": [ScriptedTurn(content="aü")]}) as server:
        message = message_of(chat(server, "x", max_tokens=2))
    assert message["content"] == "a"
    assert len(message["generation_token_ids"]) == 2


def test_a_full_context_is_refused_in_the_words_that_gym_knows(server: ScriptedModelServer) -> None:
    prompt = len(TOKENIZER.chat_prompt([USER]))
    server.context_length = prompt
    refused = chat(server, "greeting")
    assert refused.status_code == 400
    assert f"maximum context length is {prompt} tokens" in refused.json()["message"]
    server.context_length = prompt + 3
    assert message_of(chat(server, "greeting"))["content"] == "hel"
    assert chat(server, "greeting", max_tokens=4).status_code == 400
    assert [call.status for call in server.calls] == [400, 200, 400]


@pytest.mark.parametrize("limit", [0, -1, True, "8"])
def test_a_senseless_limit_is_refused(server: ScriptedModelServer, limit: Any) -> None:
    assert chat(server, "greeting", max_tokens=limit).status_code == 400


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"n": 2},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_what_the_server_has_not_is_refused(server: ScriptedModelServer, more: dict[str, Any]) -> None:
    assert chat(server, "greeting", **more).status_code == 400


def test_judge_and_policy_are_told_apart_and_recorded_in_order(server: ScriptedModelServer) -> None:
    chat(server, "greeting")
    prompt = "<|Start of Assistant A's Answer|>\n4\n<|End of Assistant A's Answer|>\n\n"
    prompt += "<|Start of Assistant B's Answer|>\n\\boxed{4}\n<|End of Assistant B's Answer|>"
    judged = post(
        server,
        "/v1/chat/completions",
        {"model": server.judge_model, "messages": [{"role": "user", "content": prompt}]},
    )
    assert message_of(judged)["content"] == "Compared. [[A=B]]"
    assert [(call.number, call.kind) for call in server.calls] == [(0, CallKind.POLICY), (1, CallKind.JUDGE)]
    assert "temperature" not in server.calls[1].body


@pytest.mark.parametrize(
    ("gold", "candidate", "label"),
    [
        ("the sun", "\\boxed{The Sun}", "[[A=B]]"),
        ("the sun", "the moon", "[[A!=B]]"),
        ("4", "44", "[[A!=B]]"),
    ],
)
def test_the_judge_reads_the_last_pair_of_a_prompt_with_examples(
    server: ScriptedModelServer, gold: str, candidate: str, label: str
) -> None:
    example = "GOLD:\n1\n\nCANDIDATE:\n1\n\n[[A=B]] equal\n\nQUESTION:\nq\n\n"
    prompt = f"{example}GOLD:\n{gold}\n\nCANDIDATE:\n{candidate}"
    body = {"model": server.judge_model, "messages": [{"role": "user", "content": prompt}]}
    assert message_of(post(server, "/v1/chat/completions", body))["content"].endswith(label)


def test_a_prompt_that_cannot_be_compared_is_not_accepted(server: ScriptedModelServer) -> None:
    body = {"model": server.judge_model, "messages": [USER]}
    assert message_of(post(server, "/v1/chat/completions", body))["content"].endswith("[[A!=B]]")


def test_without_a_script_the_call_is_refused_or_gets_the_default(server: ScriptedModelServer) -> None:
    assert chat(server, "nobody").status_code == 400
    assert CASE_KEY in chat(server, "").json()["message"]
    server.default = ScriptedTurn(content="generic")
    assert message_of(chat(server, ""))["content"] == "generic"


def test_an_unnamed_call_belongs_to_the_running_case_until_one_names_itself(
    server: ScriptedModelServer,
) -> None:
    with server.running("greeting"):
        assert message_of(chat(server, ""))["content"] == "hello"
        assert message_of(chat(server, "greeting"))["content"] == "hello"
        chat(server, "")
    kinds = [(call.kind, call.case) for call in server.calls]
    assert kinds == [
        (CallKind.POLICY, "greeting"),
        (CallKind.POLICY, "greeting"),
        (CallKind.JUDGE, "greeting"),
    ]


def test_faults_come_as_often_as_the_script_says() -> None:
    scripts = {
        "busy": [ScriptedTurn(content="at last", status=503, faulty_calls=2)],
        "broken": [ScriptedTurn(status=200, body='{"choices": [')],
        "cut": [ScriptedTurn(content="x", drop_connection=True, faulty_calls=1)],
    }
    with ScriptedModelServer(scripts) as server:
        assert [chat(server, "busy").status_code for _ in range(3)] == [503, 503, 200]
        server.clear()
        assert chat(server, "busy").status_code == 503
        assert chat(server, "broken").text == '{"choices": ['
        with pytest.raises(httpx.RemoteProtocolError):
            chat(server, "cut")
        assert message_of(chat(server, "cut"))["content"] == "x"
        assert [call.status for call in server.calls_of(CallKind.POLICY, "cut")] == [0, 200]


def test_a_delay_is_waited_for() -> None:
    with ScriptedModelServer({"slow": [ScriptedTurn(content="x", delay_s=0.3)]}) as server:
        start = time.monotonic()
        chat(server, "slow")
    assert time.monotonic() - start >= 0.3


def test_an_answer_can_be_altered_and_the_record_keeps_what_was_made(server: ScriptedModelServer) -> None:
    def alter(call: Any, document: dict[str, Any]) -> dict[str, Any]:
        document["choices"][0]["message"]["generation_token_ids"][0] += 1
        return document

    server.alter = alter
    message = message_of(chat(server, "greeting"))
    assert message["generation_token_ids"][0] == ord("h") + 1
    assert server.calls[0].generation_token_ids[0] == ord("h")


def test_many_rollouts_at_the_same_time_are_not_mixed_up() -> None:
    scripts = {f"case {index}": [ScriptedTurn(content=f"answer {index}")] for index in range(64)}
    with ScriptedModelServer(scripts) as server, concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda case: message_of(chat(server, case))["content"], scripts))
        assert answers == [f"answer {index}" for index in range(64)]
        assert sorted(call.number for call in server.calls) == list(range(64))


def test_a_stopped_server_is_dead_and_comes_back_at_its_address(server: ScriptedModelServer) -> None:
    url = server.url
    with httpx.Client(trust_env=False, timeout=5, verify=False) as client:
        assert client.get(f"{url}/health").status_code == 200
        server.stop()
        with pytest.raises(httpx.TransportError):
            client.get(f"{url}/health")
        server.start()
        assert server.url == url
        models = client.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == [server.model, server.judge_model]


def test_it_listens_on_loopback_only(server: ScriptedModelServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert httpx.get(f"{server.url}/elsewhere", trust_env=False, verify=False).status_code == 404
    assert (
        httpx.post(f"{server.url}/tokenize", content=b"{", trust_env=False, verify=False).status_code == 400
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"contents": "x"}, "has no field 'contents'"),
        ({"content": 1}, "content of a turn is 1"),
        ({"status": True, "content": "x"}, "status of a turn is True"),
        ({}, "says nothing"),
        ({"tool_calls": [{"name": "x"}]}, "a tool call is"),
        ({"tool_calls": "x"}, "expected a list"),
        ("x", "expected a list"),
    ],
)
def test_a_script_that_cannot_be_read_says_why(value: Any, problem: str) -> None:
    with pytest.raises(ScriptError, match=problem):
        turns_from([value] if isinstance(value, dict) else value)


def test_scripts_are_read_from_json() -> None:
    turns = turns_from(["hello", {"tool_calls": [{"name": "search", "arguments": {"q": 1}}], "delay_s": 0.5}])
    assert turns[0] == ScriptedTurn(content="hello")
    assert turns[1].tool_calls == (ScriptedToolCall("search", {"q": 1}),)
    with pytest.raises(ScriptError, match="at least one turn"):
        turns_from([])
