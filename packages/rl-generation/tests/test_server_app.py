"""The engine-agnostic app over engines that do as they are told."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl_generation.failures import EngineDeadError, GenerationError, NoReplicaError
from rl_generation.protocol import Completion, GenerationRequest
from rl_generation.server.parsing import TaggedParser
from rl_generation.server.settings import SamplingProfile, ServerSettings

pytest.importorskip("fastapi")
tiny = importlib.import_module("packages.rl-generation.tests.contract.tiny")

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
Engine = Callable[[GenerationRequest], Awaitable[Completion]]


class Scripted:
    """An engine that answers with a function, and remembers."""

    def __init__(self, answer: Engine) -> None:
        self.answer = answer
        self.requests: list[GenerationRequest] = []
        self.cancelled = 0

    async def generate_async(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny.write_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def ask(tokenizer: Any) -> Callable[..., tuple[httpx.Response, Scripted]]:
    from rl_generation.server.app import create_app

    def send(answer: Engine, body: dict[str, Any] | None = None, **settings: Any) -> Any:
        engine = Scripted(answer)
        settings.setdefault("request_timeout_s", 20.0)
        app = create_app(
            engine, tokenizer, ServerSettings("tiny", 128, tiny.VOCAB, **settings), TaggedParser()
        )

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                return await client.post(
                    "/v1/chat/completions", json={"messages": [USER], "max_tokens": 50, **(body or {})}
                )

        return asyncio.run(run()), engine

    return send


def saying(tokenizer: Any, text: str, reason: Any = "stop", **fields: Any) -> Engine:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if reason == "stop":
        tokens.append(tokenizer.eos_token_id)

    async def answer(request: GenerationRequest) -> Completion:
        return Completion(tuple(tokens), (-0.5,) * len(tokens), reason, 3, **fields)

    return answer


def test_text_is_without_the_end_and_tokens_are_with_it(ask: Any, tokenizer: Any) -> None:
    response, engine = ask(saying(tokenizer, "the answer"))
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "the answer"
    assert choice["message"]["generation_token_ids"][-1] == tokenizer.eos_token_id
    assert choice["finish_reason"] == "stop"
    (request,) = engine.requests
    assert request.sampling.stop_token_ids == (tokenizer.eos_token_id,)
    assert response.json()["usage"]["completion_tokens"] == len(choice["message"]["generation_token_ids"])


def test_what_is_cut_off_says_so_and_keeps_all_its_text(ask: Any, tokenizer: Any) -> None:
    choice = ask(saying(tokenizer, "half", "length"))[0].json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "half")


def test_each_token_knows_the_version_that_sampled_it(ask: Any, tokenizer: Any) -> None:
    message = ask(saying(tokenizer, "\x01\x02", "length", token_versions=(2, 3)))[0].json()["choices"][0][
        "message"
    ]
    assert message["weight_versions"] == [2, 3]


def test_what_an_engine_gave_up_is_no_answer(ask: Any, tokenizer: Any) -> None:
    response, _ = ask(saying(tokenizer, "half", "aborted"))
    assert (response.status_code, response.json()["error"]["type"]) == (503, "AbortedError")


def test_f6_what_is_left_out_is_pinned_and_a_second_profile_may_be_asked_for(
    ask: Any, tokenizer: Any
) -> None:
    profiles = (SamplingProfile("training", 0.8, 0.95, 20), SamplingProfile("validation", 0.0))
    for body, expected in (
        ({}, (0.8, 0.95, 20)),
        ({"temperature": 0.8}, (0.8, 0.95, 20)),
        ({"top_p": 0.95, "top_k": 20}, (0.8, 0.95, 20)),
        ({"temperature": 0}, (0.0, 1.0, 0)),
        ({"top_p": 1.0}, (0.0, 1.0, 0)),
    ):
        _, engine = ask(saying(tokenizer, "x"), body, profiles=profiles)
        sampling = engine.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected
    response, engine = ask(saying(tokenizer, "x"), {"temperature": 0.8, "top_p": 1.0}, profiles=profiles)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_p"
    assert not engine.requests


def test_a_bound_of_the_server_holds_where_the_request_has_none(ask: Any, tokenizer: Any) -> None:
    for body, expected in (({"max_tokens": None}, 7), ({"max_tokens": 9}, 9), ({"max_tokens": 4000}, 4000)):
        _, engine = ask(saying(tokenizer, "x"), body, max_new_tokens=7)
        room = 128 - len(engine.requests[0].prompt_token_ids)
        assert engine.requests[0].sampling.max_new_tokens == min(expected, room)


def test_tool_calls_and_thinking_are_told_apart(ask: Any, tokenizer: Any) -> None:
    text = '<think>\nhm\n</think>\n\nwell <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    choice = ask(saying(tokenizer, text), {"tools": TOOLS})[0].json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "well")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", '{"a": 1}')
    assert choice["finish_reason"] == "tool_calls"
    assert "parse_problems" not in choice
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = ask(saying(tokenizer, text), body)[0].json()["choices"][0]["message"]
        assert "tool_calls" not in message
        assert "<tool_call>" in message["content"]


def test_only_the_first_call_is_made_where_they_may_not_be_parallel(ask: Any, tokenizer: Any) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    for parallel, count in ((True, 2), (False, 1)):
        body = {"tools": TOOLS, "parallel_tool_calls": parallel}
        message = ask(saying(tokenizer, call * 2), body)[0].json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == count


def test_a_broken_call_is_left_in_the_text_and_named(ask: Any, tokenizer: Any) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": Infinity}}</tool_call>'
    response, _ = ask(saying(tokenizer, text), {"tools": TOOLS})
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    assert "Infinity" in choice["parse_problems"][0]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (EngineDeadError("r0: gone"), 503, "infra"),
        (NoReplicaError("fleet: none"), 503, "infra"),
        (GenerationError("engine: logits are not numbers"), 500, "data"),
    ],
)
def test_failures_of_the_engine_keep_their_type(
    ask: Any, failure: GenerationError, status: int, kind: str
) -> None:
    async def fail(request: GenerationRequest) -> Completion:
        raise failure

    response, _ = ask(fail)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["kind"]) == (status, type(failure).__name__, kind)
    assert ("retry-after" in response.headers) == (status == 503)


def test_what_nobody_typed_is_logged_and_not_told(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: GenerationRequest) -> Completion:
        raise KeyError("password=hunter2")

    with caplog.at_level(logging.ERROR):
        response, _ = ask(fail)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "InternalError")
    assert "hunter2" not in response.text
    assert "hunter2" in caplog.text


def test_no_answer_in_time_is_a_504_and_gives_the_request_up(ask: Any) -> None:
    async def hang(request: GenerationRequest) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError

    response, engine = ask(hang, request_timeout_s=0.05)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "DeadlineError")
    assert engine.cancelled == 1


def test_a_client_that_leaves_takes_its_request_along(tokenizer: Any) -> None:
    from rl_generation.server.app import create_app
    from rl_generation.server.reservation import ListenSettings, Reservation

    async def hang(request: GenerationRequest) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> int:
        engine = Scripted(hang)
        reservation = Reservation(ListenSettings())
        await reservation.attach_here(create_app(engine, tokenizer, ServerSettings("tiny", 128, tiny.VOCAB)))
        async with httpx.AsyncClient(base_url=reservation.url, trust_env=False) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json={"messages": [USER]}, timeout=0.5)
        for _ in range(500):
            if engine.cancelled:
                break
            await asyncio.sleep(0.01)
        await reservation.aclose()
        return engine.cancelled

    assert asyncio.run(run()) == 1


def test_a_text_that_could_not_fit_is_refused_before_it_is_tokenised(ask: Any, tokenizer: Any) -> None:
    huge = [{"role": "user", "content": "x" * (65 << 10)}]
    response, engine = ask(saying(tokenizer, "x"), {"messages": huge})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["kind"]) == (413, "BodyTooLargeError", "data")
    assert engine.requests == []


def test_a_body_that_is_too_large_is_not_read_to_its_end(ask: Any, tokenizer: Any) -> None:
    many = [{"role": "assistant", "content": "", "generation_token_ids": [1] * 999}]
    response, _ = ask(saying(tokenizer, "x"), {"messages": many}, max_body_bytes=500)
    assert (response.status_code, "500 bytes" in response.json()["error"]["message"]) == (413, True)
