"""The contract of the server over vLLM's own app, in the worker that a Ray actor runs."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
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
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Folder, tokenizer, and the model in transformers."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny.write_tokenizer(folder), tiny.write_model(folder)


@pytest.fixture(scope="module")
def worker(loop: LoopThread, model: tuple[Path, Any, Any]) -> Iterator[VllmWorker]:
    worker = VllmWorker(
        VllmSettings(str(model[0]), dtype="float32", kv_cache_bytes=32 << 20, weight_version=7),
        ListenSettings(token=TOKEN),
        VllmServerSettings(
            ServerSettings("tiny", tiny.CONTEXT, tiny.VOCAB, PROFILES, request_timeout_s=60),
            tool_parser="hermes",
        ),
    )
    yield worker
    loop.call(worker.shutdown(20), "the end", 60)


@pytest.fixture(scope="module")
def server(loop: LoopThread, worker: VllmWorker, model: tuple[Path, Any, Any]) -> Any:
    _, tokenizer, reference = model
    base_url = loop.call(worker.reserve(), "reserving", 30)
    headers = {"authorization": f"Bearer {TOKEN}"}
    before = httpx.get(f"{base_url}/models", headers=headers, trust_env=False)
    facts = loop.call(worker.start(), "the start", 280)
    return served.Served(
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


class TestVllm(cases.ServerContract):
    pass


@pytest.mark.faults
def test_a_killed_engine_is_said_at_once_and_its_successor_serves_nothing_old(
    loop: LoopThread, worker: VllmWorker, server: Any
) -> None:
    """What is in flight, what comes after, and what comes once it has started again with old weights."""
    long = [{"role": "user", "content": "x"}]
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(server.ask, long) for _ in range(4)]
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            facts = loop.call(worker.health(), "health", 30)
            if facts["in_flight"]:
                break
        os.kill(facts["pid"], signal.SIGKILL)
        began = time.monotonic()
        answers = [future.result(60) for future in asking]
        assert time.monotonic() - began < 15
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in (*refused, server.ask(long), server.client.get("/health")):
        assert (answer.status_code, served.refusal(answer)["type"]) == (503, "EngineDeadError")

    loop.call(worker.start(stale=True), "the second start", 280)
    for answer in (server.ask(long), server.client.get("/health")):
        assert (answer.status_code, served.refusal(answer)["type"]) == (503, "StaleWeightsError")
