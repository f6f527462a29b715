"""What the bridge to NeMo Gym asks of a model server, and what it reads, over the engine-agnostic server.

Gym's own conversion between chat and its items stands here in a few lines, as releases 0.4 to 0.7 have it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rl_app_core.tiny_model import make_tokenizer
from rl_generation.protocol import Completion, GenerationRequest
from rl_generation.server.app import create_app
from rl_generation.server.parsing import TaggedParser
from rl_generation.server.reservation import ListenSettings, Reservation
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_gym_bridge.answers.model_calls import read_calls
from rl_gym_bridge.config import DeferredBaseUrls
from rl_gym_bridge.inner_errors import inner_status
from rl_gym_bridge.model_servers import await_model_servers
from rl_gym_bridge.postprocess import postprocess_nemo_gym_result
from rl_gym_bridge.testing.contract import TOKEN_REQUEST
from rl_gym_bridge.trajectory import StopReason
from rl_gym_bridge.transport.choice import choose_transport

CONTEXT = 2000
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
CALL = '<think>hm</think>I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Babbler:
    """Samples any tokens at all, whose text is tokenised to others; or what it is told to say."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(0)
        self.next_text: str | None = None

    async def generate_async(self, request: GenerationRequest) -> Completion:
        text, self.next_text = self.next_text, None
        if text is None:
            tokens = [self.random.randrange(256) for _ in range(min(12, request.sampling.max_new_tokens))]
            stop = len(tokens) == 12
        else:
            tokens, stop = self.tokenizer.encode(text, add_special_tokens=False), True
        if stop:
            tokens.append(self.tokenizer.eos_token_id)
        logprobs = tuple(-self.random.random() for _ in tokens)
        return Completion(tuple(tokens), logprobs, "stop" if stop else "length", 5)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["what is the answer to the question"] * 3, 300)


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[tuple[Reservation, Babbler]]:
    engine = Babbler(tokenizer)
    reservation = Reservation(ListenSettings())
    settings = ServerSettings(
        "policy",
        CONTEXT,
        len(tokenizer),
        (SamplingProfile("training", 0.8), SamplingProfile("validation", 0)),
    )
    reservation.attach(create_app(engine, tokenizer, settings, TaggedParser()))
    yield reservation, engine
    reservation.close()


def ask(server: Reservation, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    """As Gym's model server asks for a policy's answer."""
    body = {"model": "policy", "messages": messages, "parallel_tool_calls": True, "temperature": 0.8}
    body |= {"max_tokens": 40, "metadata": {"extra_body": "{}"}, **TOKEN_REQUEST, **more}
    return httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=30, trust_env=False)


def items_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """An answer's message as Gym's items; the last one carries the tokens."""
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "summary": summary})
    calls = message.get("tool_calls") or []
    if message["content"] or not (items or calls):
        content = [{"type": "output_text", "text": message["content"] or ""}]
        items.append({"type": "message", "role": "assistant", "content": content})
    items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    items[-1] |= {name: message[name] for name in message if name.endswith(("_ids", "_probs", "_versions"))}
    return items


def history_of(message: dict[str, Any]) -> dict[str, Any]:
    """An answer's message as Gym puts it into the next request."""
    thought = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
    kept = {"role": "assistant", "content": [{"type": "text", "text": thought + (message["content"] or "")}]}
    names = ("tool_calls", "prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return kept | {name: message[name] for name in names if name in message}


def test_a_conversation_with_tools_becomes_an_exact_trajectory(
    server: tuple[Reservation, Babbler], tokenizer: Any
) -> None:
    """Three calls; the bridge checks that every prompt extends all tokens before it."""
    reservation, engine = server
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is the answer"}]
    output: list[dict[str, Any]] = []
    sampled: list[int] = []
    for turn in range(3):
        engine.next_text = CALL if turn == 1 else None
        response = ask(reservation, messages, tools=[TOOL], tool_choice="auto")
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        sampled += message["generation_token_ids"]
        output += items_of(message)
        messages.append(history_of(message))
        if message.get("tool_calls"):
            (call,) = message["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
            output.append({"type": "function_call_output", "call_id": call["id"], "output": "3"})
        else:
            messages.append({"role": "user", "content": "go on"})
            output.append({"type": "message", "role": "user", "content": "go on"})
    output.pop()
    text = tokenizer.decode(sampled)
    assert tokenizer.encode(text, add_special_tokens=False) != sampled

    calls = read_calls(output, cut_off_by="", cause="").calls
    assert [call.weight_versions for call in calls] == [
        [5] * len(call.generation_token_ids) for call in calls
    ]
    answer = {
        "responses_create_params": {"input": "q"},
        "response": {"output": output, "incomplete_details": None, "error": None, "status": None},
        "reward": 1.0,
    }
    trajectory = postprocess_nemo_gym_result(answer)
    assert len(trajectory.turns) == 3
    assert trajectory.stop_reason is StopReason.STOP
    assert trajectory.metrics["tool_calls"] == 1
    assert trajectory.sampled_tokens == len(sampled)
    assert [token for turn in trajectory.turns for token in turn.generation_token_ids] == sampled


def test_f2_a_full_context_is_what_gym_takes_for_one(server: tuple[Reservation, Babbler]) -> None:
    response = ask(server[0], [{"role": "user", "content": "x" * 3 * CONTEXT}])
    assert response.status_code == 400
    # Gym's own condition, responses_api_models/vllm_model/app.py.
    assert "context length" in response.text or "max_tokens" in response.text


def test_an_error_keeps_its_status_through_gyms_quotation(server: tuple[Reservation, Babbler]) -> None:
    response = ask(server[0], [{"role": "user", "content": "x"}], frequency_penalty=1.0)
    quoted = json.dumps(f"Hit an exception in policy_model calling an inner server: {response.content!r}")
    assert inner_status(quoted.encode()) == response.status_code == 400


def test_tokens_asked_for_beside_the_answer_are_its_own(server: tuple[Reservation, Babbler]) -> None:
    """Gym's way with a server that has no token fields: log-probabilities, and ``/tokenize``."""
    reservation, _ = server
    messages = [{"role": "user", "content": "what is the answer"}]
    choice = ask(reservation, messages).json()["choices"][0]
    message = choice["message"]
    tokens = [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]]
    assert tokens == message["generation_token_ids"]
    body = {"model": "policy", "messages": messages}
    tokenized = httpx.post(f"{reservation.base_url}/../tokenize", json=body, timeout=30, trust_env=False)
    assert tokenized.json()["tokens"] == message["prompt_token_ids"]


def test_gym_may_start_on_an_address_whose_engine_still_loads(tokenizer: Any) -> None:
    reservation = Reservation(ListenSettings())
    settings = ServerSettings("policy", CONTEXT, len(tokenizer))
    app = create_app(Babbler(tokenizer), tokenizer, settings)

    async def wait() -> None:
        transport = choose_transport("auto", max_concurrency=4)
        deferred = DeferredBaseUrls((reservation.base_url,), 20.0)
        waiting = asyncio.ensure_future(await_model_servers(deferred, transport))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        reservation.attach(app)
        try:
            await waiting
        finally:
            await transport.aclose()

    try:
        asyncio.run(wait())
    finally:
        reservation.close()
