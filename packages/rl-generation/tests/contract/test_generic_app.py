"""The contract over the engine-agnostic app, with megatron-core behind it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from rl_generation.batching import RequestBatcher
from rl_generation.server.settings import SamplingProfile, ServerSettings

pytest.importorskip("fastapi")
cases = importlib.import_module("packages.rl-generation.tests.contract.cases")
served = importlib.import_module("packages.rl-generation.tests.contract.served")
tiny = importlib.import_module("packages.rl-generation.tests.contract.tiny")

PROFILES = (SamplingProfile("training", 1.0), SamplingProfile("validation", 0.6))


@pytest.fixture(scope="module")
def server(build_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tiny model whose twin in transformers scores what it says."""
    from rl_generation.megatron import MegatronGeneration
    from rl_generation.server.app import create_app
    from rl_generation.server.reservation import ListenSettings, Reservation

    directory = tmp_path_factory.mktemp("tiny")
    tokenizer, reference = tiny.write_tokenizer(directory), tiny.write_model(directory)
    model = build_model(context=tiny.CONTEXT, vocab=tiny.VOCAB, kv_channels=tiny.HEAD)
    tiny.copy_to_megatron(reference, model)
    engine = MegatronGeneration(
        model, vocab_size=tiny.VOCAB, max_context=tiny.CONTEXT, weight_version=7, wait_timeout_s=60
    )
    batcher = RequestBatcher(engine, timeout_s=60)
    reservation = Reservation(ListenSettings(token="s3cret"))
    try:
        before = httpx.get(
            f"{reservation.url}/v1/models", headers={"authorization": "Bearer s3cret"}, trust_env=False
        )
        settings = ServerSettings("tiny", tiny.CONTEXT, tiny.VOCAB, PROFILES, request_timeout_s=60)
        reservation.attach(create_app(batcher, tokenizer, settings))
        yield served.Served(
            url=reservation.url,
            token="s3cret",
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
    finally:
        reservation.close()
        batcher.close()
        engine.shutdown(5)


class TestMegatron(cases.ServerContract):
    pass
