"""The contract of every server, with the engine's worker behind it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl_generation.failures import InvalidRequestError, StaleWeightsError
from rl_generation.fleet.replica import EngineActor
from rl_generation.fleet.threads import LoopThread
from rl_generation.protocol import GenerationRequest, SamplingParams
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings
from rl_generation.server.reservation import ListenSettings
from rl_generation.server.settings import SamplingProfile, ServerSettings
from rl_generation.trtllm import TrtllmSettings
from rl_generation.trtllm.environment import workers_environment
from rl_generation.trtllm.worker import TrtllmWorker

pytest.importorskip("fastapi")
cases = importlib.import_module("packages.rl-generation.tests.contract.cases")
served = importlib.import_module("packages.rl-generation.tests.contract.served")
tiny = importlib.import_module("packages.rl-generation.tests.contract.tiny")

NEWER = pytest.mark.parametrize("release", ["1.3.0"], scope="module")
OLDER = pytest.mark.parametrize("release", ["1.2.1"], scope="module")
PROFILES = (SamplingProfile("training", 1.0), SamplingProfile("validation", 0.6))
TOKEN = "s3cret"
# The least that the longest conversation of the contract needs: some cases fill it.
CONTEXT = 144


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer whose decoding does not undo its encoding."""
    made = tmp_path_factory.mktemp("served")
    tiny.write_tokenizer(made)
    tiny.write_model(made)
    return made


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker owns its process, and here it does not."""
    monkeypatch.setattr("rl_generation.trtllm.worker.workers_environment", lambda *_: {})


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    """Where the worker lives, as in an actor."""
    thread = LoopThread("trtllm-test")
    yield thread
    thread.close(5)


def worker_of(folder: Path, *profiles: SamplingProfile, serves: bool = True) -> TrtllmWorker:
    return TrtllmWorker(
        TrtllmSettings(str(folder), max_context=CONTEXT, weight_version=7),
        ListenSettings(token=TOKEN) if serves else None,
        ServerSettings("tiny", 9, 9, profiles or PROFILES, request_timeout_s=60),
        transport=TransportSettings(bucket_bytes=8192),
        check=lambda: None,
    )


@pytest.fixture(scope="module")
def server(imported_double: Any, folder: Path, loop: LoopThread) -> Iterator[Any]:
    """A worker that serves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    worker = worker_of(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_generation.trtllm.worker.workers_environment", lambda *_: {})
        url = loop.call(worker.reserve(), "reserve", 30)
        assert url is not None
        root = url.removesuffix("/v1")
        before = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False)
        facts = loop.call(worker.start(), "start", 60)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    yield served.Served(
        url=root,
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
    loop.call(worker.shutdown(5), "shutdown", 20)


@NEWER
class TestTrtllm(cases.ServerContract):
    """Every case of it."""


def ask(url: str) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)


@NEWER
@pytest.mark.usefixtures("clean_environment")
def test_a_worker_that_starts_stale_serves_nothing_before_its_refit(
    double: Any, folder: Path, loop: LoopThread, release: str
) -> None:
    worker = worker_of(folder)
    loaded = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder)
    tensors = {name: t for name, t in loaded.state_dict().items() if name != "lm_head.weight"}
    entries = spec_of_tensors(tensors.items()).tensors
    source = TensorSource(lambda: entries, lambda: tensors.items(), TransportSettings(bucket_bytes=8192))

    async def refit() -> None:
        await worker.begin_refit(source.begin("shared_memory"), 9)
        while (bucket := source.next_bucket()) is not None:
            await worker.load_bucket(bucket)
        await worker.finish_refit()

    url = loop.call(worker.reserve(), "reserve", 30)
    assert url is not None
    try:
        loop.call(worker.start(stale=True), "start", 60)
        response = ask(url)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "StaleWeightsError")
        with pytest.raises(StaleWeightsError):
            loop.call(worker.generate([GenerationRequest((1,), SamplingParams(1))]), "generate", 30)
        loop.call(worker.abort_refit(), "abort", 30)
        assert ask(url).status_code == 503
        loop.call(refit(), "refit", 60)
        response = ask(url)
        assert response.status_code == 200, response.text
        versions = response.json()["choices"][0]["message"]["weight_versions"]
        assert set(versions) == {9}
        assert loop.call(worker.health(), "health", 5)["url"] == url
        loop.call(worker.start(stale=True), "start again", 60)
        assert ask(url).status_code == 503
        assert loop.call(worker.health(), "health", 5)["state"] == "stale"
    finally:
        source.end()
        loop.call(worker.shutdown(5), "shutdown", 20)


@OLDER
@pytest.mark.usefixtures("clean_environment")
def test_a_profile_that_the_release_cannot_score_is_refused_at_the_start(
    double: Any, folder: Path, loop: LoopThread, release: str
) -> None:
    worker = worker_of(folder)
    try:
        with pytest.raises(InvalidRequestError, match="validation"):
            loop.call(worker.start(), "start", 60)
    finally:
        loop.call(worker.shutdown(5), "shutdown", 20)


@OLDER
@pytest.mark.usefixtures("clean_environment")
def test_a_worker_without_http_has_no_url(double: Any, folder: Path, loop: LoopThread, release: str) -> None:
    worker: EngineActor = worker_of(folder, serves=False)
    try:
        assert loop.call(worker.reserve(), "reserve", 5) is None
        assert loop.call(worker.start(), "start", 60).weight_version == 7
        loop.call(worker.probe(), "probe", 30)
        for step in (worker.pause, worker.resume):
            loop.call(step(), "step", 30)
        (answer,) = loop.call(worker.generate([GenerationRequest((1,), SamplingParams(2))]), "generate", 30)
        assert len(answer.token_ids) == 2
    finally:
        loop.call(worker.shutdown(5), "shutdown", 20)


def test_the_workers_inherit_what_they_need() -> None:
    changes = workers_environment({"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": ""}, "/env/bin/python")
    assert changes["PATH"] == "/env/bin:/usr/bin"
    assert changes["CUDA_VISIBLE_DEVICES"] is None
    assert changes["TLLM_DISABLE_MPI"] == "1"
    kept = workers_environment({"PATH": "/env/bin:/usr/bin", "CUDA_VISIBLE_DEVICES": "3"}, "/env/bin/python")
    assert not {"PATH", "CUDA_VISIBLE_DEVICES"} & set(kept)
