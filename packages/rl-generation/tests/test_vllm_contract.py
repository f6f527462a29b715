"""Our contract around vLLM's app and its engine, both stood in for: what goes in, what comes out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rl_generation.failures import EngineDeadError, GenerationError, InvalidRequestError
from rl_generation.protocol import Completion
from rl_generation.server.asgi import read_body, send_json
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_generation.server.sizes import read_document
from rl_generation.vllm.contract import VllmContract
from rl_generation.vllm.exchange import CURRENT, Exchange
from rl_generation.vllm.observed import ObservedClient
from rl_generation.vllm.server import VllmServerSettings, build_server_app

pytest.importorskip("pydantic")
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
PROFILES = (SamplingProfile("training", 0.8, 0.9, 5), SamplingProfile("validation", 0.0))
Answer = Callable[[Any, Any], Awaitable[tuple[int, Any]]]


class StandIn:
    """vLLM's app: remembers bodies, and answers with a function of body and exchange."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.disconnects = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append(json.loads(await read_body(receive)))
        self.headers.append(dict(scope["headers"]))
        work = asyncio.ensure_future(self.answer(self.bodies[-1], CURRENT.get()))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            gone.cancel()
            status, document = work.result()
        else:
            self.disconnects += gone.result()["type"] == "http.disconnect"
            work.cancel()
            status, document = 200, None
        await send_json(send, status, document)


def client_double() -> Any:
    async def well() -> None: ...

    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
    return SimpleNamespace(check_health=well, renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer))


def saying(message: dict[str, Any], reason: Any = "stop", versions: tuple[int, ...] = ()) -> Answer:
    async def answer(body: Any, exchange: Exchange) -> tuple[int, Any]:
        exchange.prompt = (1, 2)
        exchange.completion = Completion((3, 4), (-0.25, -0.5), reason, 9, versions)
        return 200, {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]}

    return answer


def ask(
    answer: Answer,
    body: dict[str, Any] | None = None,
    *,
    path: str = "/v1/chat/completions",
    calls_tools: bool = True,
    timeout_s: float = 10.0,
    **headers: str,
) -> tuple[httpx.Response, StandIn]:
    app = StandIn(answer)
    settings = ServerSettings("tiny", 64, 100, PROFILES, stop_token_ids=(7,), request_timeout_s=timeout_s)
    contract = VllmContract(app, client_double(), settings, calls_tools=calls_tools)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(contract)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await client.post(path, json={"messages": [USER], **(body or {})}, headers=headers)

    return asyncio.run(run()), app


def test_f6_everything_that_decides_a_distribution_is_written_out() -> None:
    _, app = ask(saying({"content": "x"}), {"max_tokens": 9, "seed": 4})
    (body,) = app.bodies
    seed = body.pop("seed")
    assert seed not in (None, 4)
    assert body == {
        "model": "tiny",
        "messages": [USER],
        "n": 1,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_completion_tokens": 9,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    _, app = ask(saying({"content": "x"}), {"temperature": 0})
    assert (app.bodies[0]["temperature"], app.bodies[0]["max_completion_tokens"]) == (0.0, 64)


def test_tokens_go_beside_the_messages_and_secrets_not_at_all() -> None:
    kept: list[Any] = []

    async def look(body: Any, exchange: Exchange) -> tuple[int, Any]:
        kept.append(exchange.carried)
        return await saying({"content": "x"})(body, exchange)

    earlier = {"role": "assistant", "content": "a", "prompt_token_ids": [5], "generation_token_ids": [6]}
    _, app = ask(look, {"messages": [USER, earlier, USER]}, authorization="Bearer s3cret")
    assert app.bodies[0]["messages"] == [USER, {"role": "assistant", "content": "a"}, USER]
    assert kept[0].token_ids == (5, 6)
    assert b"authorization" not in app.headers[0]
    assert CURRENT.get() is None


def test_the_answer_is_the_engines_own_output() -> None:
    response, _ = ask(
        saying({"content": "", "reasoning": "hm", "refusal": None}, "length", (8, 9)), {"logprobs": True}
    )
    choice = response.json()["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 4],
        "generation_log_probs": [-0.25, -0.5],
        "weight_versions": [8, 9],
    }
    assert choice["finish_reason"] == "length"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["<3>", "<4>"]


def test_tools_are_called_only_where_there_is_a_parser() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = saying({"content": None, "tool_calls": [call]})
    response, app = ask(answer, {"tools": TOOLS})
    choice = response.json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == call["function"]
    assert choice["finish_reason"] == "tool_calls"
    assert app.bodies[0]["tool_choice"] == "auto"
    for body, calls_tools in (({"tools": TOOLS}, False), ({"tools": TOOLS, "tool_choice": "none"}, True)):
        assert ask(answer, body, calls_tools=calls_tools)[1].bodies[0]["tool_choice"] == "none"
    # vLLM refuses a choice without tools, and an empty list of them.
    _, app = ask(answer, {"tools": [], "tool_choice": "auto"})
    assert not {"tools", "tool_choice"} & set(app.bodies[0])


def test_a_call_that_vllm_could_not_read_is_named() -> None:
    answer = saying({"content": "<tool_call>{broken"})
    assert ask(answer, {"tools": TOOLS})[0].json()["choices"][0]["parse_problems"]
    assert "parse_problems" not in ask(answer)[0].json()["choices"][0]


def test_what_the_engine_gave_up_is_no_answer() -> None:
    response, _ = ask(saying({"content": "half"}, "aborted"))
    assert (response.status_code, response.json()["error"]["type"]) == (503, "AbortedError")


@pytest.mark.parametrize(
    ("status", "document", "expected", "kind"),
    [
        (400, {"error": {"message": "no", "param": "messages"}}, 400, "InvalidRequestError"),
        (422, {"object": "error", "message": "no"}, 400, "InvalidRequestError"),
        (500, {"error": {"message": "no"}}, 500, "GenerationError"),
        (503, {"error": {"message": "no"}}, 503, "InfraError"),
        (200, {"choices": []}, 503, "InfraError"),
    ],
)
def test_errors_of_vllms_own_app_get_our_types(status: int, document: Any, expected: int, kind: str) -> None:
    async def fail(body: Any, exchange: Exchange) -> tuple[int, Any]:
        return status, document

    response, _ = ask(fail)
    assert (response.status_code, response.json()["error"]["type"]) == (expected, kind)


def test_a_failure_inside_keeps_its_type() -> None:
    async def fail(body: Any, exchange: Exchange) -> tuple[int, Any]:
        exchange.failure = EngineDeadError("r0: gone")
        return 500, {}

    response, _ = ask(fail)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "EngineDeadError")


@pytest.mark.parametrize("odd", [float("nan"), float("-inf")])
def test_an_answer_that_is_no_json_is_a_typed_error_too(odd: float) -> None:
    async def answer(body: Any, exchange: Exchange) -> tuple[int, Any]:
        exchange.completion = Completion((3,), (odd,), "stop", 9)
        return 200, {"choices": [{"message": {"content": "x"}}]}

    response, _ = ask(answer)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["kind"]) == (500, "InternalError", "data")


def test_half_a_character_is_refused_as_any_other_unknown_field() -> None:
    app = StandIn(saying({"content": "x"}))
    contract = VllmContract(app, client_double(), ServerSettings("tiny", 64, 100), calls_tools=False)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(contract)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await client.post("/v1/chat/completions", content=b'{"messages": [], "\\ud800": 1}')

    error = asyncio.run(run()).json()["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "InvalidRequestError", "\ud800")


def test_nothing_that_would_be_fetched_gets_to_vllm() -> None:
    def asked(part: dict[str, Any], path: str) -> tuple[httpx.Response, StandIn]:
        return ask(saying({"content": "x"}), {"messages": [{"role": "user", "content": [part]}]}, path=path)

    for path in ("/v1/chat/completions", "/tokenize"):
        response, app = asked({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}, path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages.0.content")
        assert not app.bodies
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert asked(picture, "/v1/chat/completions")[1].bodies[0]["messages"][0]["content"] == [picture]


def test_no_answer_in_time_ends_the_request_inside_vllm() -> None:
    async def hang(body: Any, exchange: Exchange) -> tuple[int, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    response, app = ask(hang, timeout_s=0.05)
    assert (response.status_code, response.json()["error"]["type"]) == (504, "DeadlineError")
    assert app.disconnects == 1


def test_other_ways_into_vllm_are_closed() -> None:
    for path in ("/v1/completions", "/v1/responses", "/inference/v1/generate", "/v1/load_lora_adapter"):
        response, app = ask(saying({"content": "x"}), path=path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "UnknownRouteError")
        assert not app.bodies


def test_tokenize_samples_nothing_and_takes_text_too() -> None:
    async def tokens(body: Any, exchange: Exchange) -> tuple[int, Any]:
        assert exchange.pinned is None
        return 200, {"tokens": [1, 2], "count": 2, "max_model_len": None, "token_strs": None}

    for body in ({}, {"prompt": "x", "messages": None}):
        response, _ = ask(tokens, body, path="/tokenize")
        assert response.json() == {"count": 2, "max_model_len": 64, "tokens": [1, 2]}


# --- the engine as vLLM's app sees it


class EngineStandIn:
    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.seen: list[Any] = []
        self.model_config = SimpleNamespace(generation_config="vllm", logprobs_mode="processed_logprobs")

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> Any:
        self.seen.append(sampling)
        if self.failure:
            raise self.failure
        yield SimpleNamespace(finished=False)
        yield SimpleNamespace(finished=True)


def sample(engine: EngineStandIn, exchange: Exchange | None, **settings: Any) -> list[Any]:
    wanted = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "n": 1, "structured_outputs": None}
    done = Completion((3,), (-1.0,), "stop", 9)
    client = ObservedClient(engine, lambda output: done)

    async def run() -> list[Any]:
        CURRENT.set(exchange)
        sampling = SimpleNamespace(**(wanted | settings))
        return [output async for output in client.generate("prompt", sampling, "id")]

    return asyncio.run(run())


def pinned() -> Exchange:
    from rl_generation.server.pinning import PinnedRequest

    return Exchange(None, PinnedRequest(PROFILES[0], None, None))


def test_the_output_is_kept_whole() -> None:
    engine, exchange = EngineStandIn(), pinned()
    assert len(sample(engine, exchange)) == 2
    assert exchange.completion is not None
    assert (engine.seen[0].logprobs, engine.seen[0].flat_logprobs) == (0, True)


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"top_p": 1.0}, {"structured_outputs": "grammar"}]
)
def test_whatever_changes_the_settings_on_the_way_is_found_out(settings: dict[str, Any]) -> None:
    engine = EngineStandIn()
    with pytest.raises(InvalidRequestError, match=next(iter(settings))):
        sample(engine, pinned(), **settings)
    assert not engine.seen


def test_nothing_is_sampled_outside_the_contract() -> None:
    for exchange in (None, Exchange(None, None)):
        with pytest.raises(InvalidRequestError, match="only"):
            sample(EngineStandIn(), exchange)


def test_failures_of_vllm_are_typed() -> None:
    class EngineDead(Exception):
        pass

    EngineDead.__name__ = "EngineDeadError"
    with pytest.raises(EngineDeadError) as failure:
        sample(EngineStandIn(EngineDead("gone")), pinned())
    assert isinstance(failure.value.__cause__, EngineDead)


@pytest.mark.parametrize("name", ["generation_config", "logprobs_mode"])
def test_f6_an_engine_with_the_models_own_defaults_is_not_served(name: str) -> None:
    engine = EngineStandIn()
    setattr(engine.model_config, name, "auto")
    settings = VllmServerSettings(ServerSettings("tiny", 64, 100))
    with pytest.raises(GenerationError, match=name):
        asyncio.run(build_server_app(engine, settings, lambda: 0))


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        VllmServerSettings(ServerSettings("tiny", 64, 100, (SamplingProfile("cold", 0.001),)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_text_that_could_not_fit_never_reaches_vllm(path: str) -> None:
    huge = {"messages": [{"role": "user", "content": "x" * (65 << 10)}]}
    response, app = ask(saying({"content": "x"}), huge, path=path)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "BodyTooLargeError")
    assert app.bodies == []


def test_media_are_no_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (65 << 10)}}
    document = {"messages": [{"role": "user", "content": [image]}]}

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(document).encode()}

    assert asyncio.run(read_document(receive, ServerSettings("tiny", 64, 100))) == document
