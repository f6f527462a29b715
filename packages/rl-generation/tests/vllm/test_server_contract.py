"""The contract of the server over vLLM's own app, in the worker that a Ray actor runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from rl_generation.fleet.threads import LoopThread
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


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    """Where the worker lives, as in an actor."""
    thread = LoopThread("vllm-test")
    yield thread
    thread.close(5)


@pytest.fixture(scope="module")
def server(loop: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
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
    base_url = loop.submit(worker.reserve()).result(30)
    headers = {"authorization": f"Bearer {TOKEN}"}
    before = httpx.get(f"{base_url}/models", headers=headers, trust_env=False)
    try:
        facts = loop.submit(worker.start()).result(280)
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
        loop.submit(worker.shutdown(20)).result(60)


class TestVllm(cases.ServerContract):
    pass
