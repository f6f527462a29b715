"""The contract of the server over vLLM's own app, in the worker that a Ray actor runs."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from rl_generation.server.reservation import ListenSettings
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_generation.vllm.server import VllmServerSettings
from rl_generation.vllm.settings import VllmSettings
from rl_generation.vllm.worker import VllmWorker

cases = importlib.import_module("packages.rl-generation.tests.contract.cases")
served = importlib.import_module("packages.rl-generation.tests.contract.served")
tiny = importlib.import_module("packages.rl-generation.tests.contract.tiny")

PROFILES = (SamplingProfile("training", 1.0), SamplingProfile("validation", 0.6))
TOKEN = "s3cret"


class Loop:
    """An event loop in a thread, as an actor has one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(280)

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
def server(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer, reference = tiny.write_tokenizer(directory), tiny.write_model(directory)
    worker = VllmWorker(
        VllmSettings(str(directory), dtype="float32", kv_cache_bytes=32 << 20, weight_version=7),
        ListenSettings(token=TOKEN),
        VllmServerSettings(
            ServerSettings("tiny", tiny.CONTEXT, tiny.VOCAB, PROFILES, request_timeout_s=60),
            tool_parser="hermes",
        ),
    )
    base_url = loop.run(worker.reserve())
    headers = {"authorization": f"Bearer {TOKEN}"}
    before = httpx.get(f"{base_url}/models", headers=headers, trust_env=False)
    try:
        facts = loop.run(worker.start())
        yield served.Served(
            url=base_url.removesuffix("/v1"),
            token=TOKEN,
            model="tiny",
            tokenizer=tokenizer,
            max_context=facts.max_context,
            vocab_size=facts.vocab_size,
            turn_end=tokenizer.eos_token_id,
            profiles=(1.0, 0.6),
            weight_version=7,
            score=partial(tiny.logprobs, reference),
            before_ready=before,
        )
    finally:
        loop.run(worker.shutdown(20))


class TestVllm(cases.ServerContract):
    pass
