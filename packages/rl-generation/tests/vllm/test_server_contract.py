"""The contract of the server over vLLM's own app."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from rl_generation.server.reservation import ListenSettings, Reservation
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_generation.vllm.arguments import engine_arguments, executor_name
from rl_generation.vllm.environment import prepare_environment
from rl_generation.vllm.server import VllmServerSettings, build_server_app
from rl_generation.vllm.settings import VllmSettings

cases = importlib.import_module("packages.rl-generation.tests.contract.cases")
served = importlib.import_module("packages.rl-generation.tests.contract.served")
tiny = importlib.import_module("packages.rl-generation.tests.contract.tiny")

PROFILES = (SamplingProfile("training", 1.0), SamplingProfile("validation", 0.6))
TOKEN = "s3cret"


class Loop:
    """An event loop in a thread, as an engine actor has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 120) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Directory, tokenizer, and the model in transformers."""
    directory = tmp_path_factory.mktemp("tiny")
    return directory, tiny.write_tokenizer(directory), tiny.write_model(directory)


@pytest.fixture(scope="module")
def client(loop: Loop, model: tuple[Any, Any, Any]) -> Iterator[Any]:
    """vLLM's engine, started as the product's own engine is."""
    settings = VllmSettings(str(model[0]), dtype="float32", kv_cache_bytes=32 << 20)
    prepare_environment(settings, cpu=True)

    async def start() -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(settings, cpu=True)
        arguments["distributed_executor_backend"] = executor_name(settings)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    client = loop.run(start())
    yield client

    async def stop() -> None:
        client.shutdown()

    loop.run(stop())


def contract() -> ServerSettings:
    return ServerSettings("tiny", tiny.CONTEXT, tiny.VOCAB, PROFILES, request_timeout_s=60)


@pytest.fixture(scope="module")
def server(loop: Loop, client: Any, model: tuple[Any, Any, Any]) -> Iterator[Any]:
    _, tokenizer, reference = model
    reservation = Reservation(ListenSettings(token=TOKEN))
    headers = {"authorization": f"Bearer {TOKEN}"}
    before = httpx.get(f"{reservation.url}/v1/models", headers=headers, trust_env=False)
    settings = VllmServerSettings(contract(), tool_parser="hermes")

    async def attach() -> None:
        await reservation.attach_here(await build_server_app(client, settings, lambda: 7))

    loop.run(attach())
    yield served.Served(
        url=reservation.url,
        token=TOKEN,
        model="tiny",
        tokenizer=tokenizer,
        max_context=tiny.CONTEXT,
        vocab_size=tiny.VOCAB,
        turn_end=tokenizer.eos_token_id,
        profiles=(1.0, 0.6),
        weight_version=7,
        score=partial(tiny.logprobs, reference),
        before_ready=before,
    )
    loop.run(reservation.aclose())


class TestVllm(cases.ServerContract):
    pass
