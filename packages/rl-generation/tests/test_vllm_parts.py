"""What vLLM's engine is made of, without vLLM: settings, seeds, arguments, answers, failures, waiting."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_generation.failures import (
    ContextOverflowError,
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    InvalidRequestError,
    StaleWeightsError,
    UnavailableBackendError,
)
from rl_generation.protocol import GenerationRequest, SamplingParams
from rl_generation.server.reservation import ListenSettings
from rl_generation.vllm import VllmSettings, VllmWorker, environment, parentage
from rl_generation.vllm.arguments import engine_arguments, executor_name, sampling_arguments
from rl_generation.vllm.async_driver import AsyncDriver
from rl_generation.vllm.environment import environment_for, is_cpu_build
from rl_generation.vllm.faults import causes, converted
from rl_generation.vllm.processes import start_method
from rl_generation.vllm.seeds import mixed, request_seed
from rl_generation.vllm.trouble import Trouble, guarded


def test_naming_an_engine_imports_nothing_heavy() -> None:
    script = (
        "import sys; import rl_generation.vllm.worker; "
        "print(*{'vllm', 'ray', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes"),
        ({"replica": -1}, "replica"),
        ({"start_timeout_s": 0.0}, "start_timeout_s"),
        ({"refit_timeout_s": float("inf")}, "refit_timeout_s"),
        ({"engine_arguments": {"max_model_len": 4}}, "set max_model_len of the settings"),
        ({"engine_arguments": {"logprobs_mode": "raw_logprobs"}}, "not free"),
        ({"engine_arguments": {"generation_config": "auto"}}, "not free"),
        ({"engine_arguments": {"kv_transfer_config": {}}}, "not free"),
        ({"engine_arguments": {"kv_cache_dtype": "fp8"}}, "could not score"),
        ({"engine_arguments": {"quantization": "fp8"}}, "could not score"),
        ({"engine_arguments": {"speculative_config": {}}}, "could not score"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_cannot_be_are_refused(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VllmSettings("model", **setting)


def test_http_needs_an_engine_that_can_serve_it() -> None:
    for worker in (
        lambda: VllmWorker(VllmSettings("m", tokenizer=False), ListenSettings()),
        lambda: VllmWorker(VllmSettings("m"), ListenSettings(), synchronous=True),
    ):
        with pytest.raises(ValueError, match="cannot serve HTTP"):
            worker()


def test_seeds_differ_in_their_low_bits_even_where_their_own_do_not() -> None:
    low = {mixed(step << 32) & 0xFFFFFFFF for step in range(4096)}
    assert len(low) >= 4095
    assert len({mixed(value) for value in range(10_000)}) == 10_000
    assert request_seed(None) is None
    assert 0 <= (request_seed(2**63 - 1) or 0) < 2**63
    seeds = [
        VllmSettings("m", seed=seed, replica=replica).engine_seed for seed in range(8) for replica in range(8)
    ]
    assert len(set(seeds)) == 64
    assert max(seeds) < 2**31


def test_the_arguments_of_the_engine_leave_nothing_to_the_model() -> None:
    settings = VllmSettings("m", max_model_len=64, seed=1, engine_arguments={"block_size": 16})
    on_cpu, on_gpu = (engine_arguments(settings, cpu=cpu) for cpu in (True, False))
    for arguments in (on_cpu, on_gpu):
        assert arguments["generation_config"] == "vllm"
        assert arguments["logprobs_mode"] == "processed_logprobs"
        assert (arguments["max_model_len"], arguments["block_size"]) == (64, 16)
    # On a CPU the share that is the default would be one of the machine's memory.
    assert on_cpu["kv_cache_memory_bytes"] == 256 << 20
    assert "kv_cache_memory_bytes" not in on_gpu
    assert on_cpu["enforce_eager"]
    assert "enforce_eager" not in on_gpu
    assert on_cpu["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in on_gpu
    assert executor_name(settings).endswith("OneProcess")
    assert executor_name(VllmSettings("m", tensor_parallel_size=2)).endswith("ManyProcesses")


def arguments_for(request: GenerationRequest) -> dict[str, Any]:
    return sampling_arguments(request, max_context=512, vocab_size=100, component="vllm-0")


def test_f6_every_setting_of_a_request_is_said() -> None:
    said = arguments_for(GenerationRequest((1, 2), SamplingParams(700, stop_token_ids=(3,))))
    neutral = dict(
        min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0
    )
    assert said | neutral | {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "ignore_eos": True, "n": 1} == said
    assert (said["max_tokens"], said["stop_token_ids"], said["logprobs"], said["seed"]) == (510, [3], 0, None)
    cold = arguments_for(GenerationRequest((1,), SamplingParams(4, temperature=0, top_p=0.5, top_k=3)))
    assert (cold["temperature"], cold["top_p"], cold["top_k"]) == (0, 1.0, 0)


def test_f1_a_prompt_beyond_the_context_is_said_with_both_numbers() -> None:
    with pytest.raises(ContextOverflowError, match=r"698 tokens.*512") as caught:
        arguments_for(GenerationRequest((1,) * 698, SamplingParams(4)))
    assert "-" not in str(caught.value).removeprefix("vllm-0")


def test_vllms_exceptions_are_typed_by_name_and_survive_pickling() -> None:
    def made(name: str, *bases: type[BaseException]) -> BaseException:
        return type(name, bases or (Exception,), {})("because")

    cases = {
        EngineDeadError: made("EngineDeadError"),
        InvalidRequestError: made("VLLMValidationError", ValueError),
        InfraError: made("EngineGenerateError"),
        DeadlineError: TimeoutError("because"),
        GenerationError: made("Unheard"),
    }
    for kind, error in cases.items():
        failure = converted(error, "vllm-0", "sampling")
        assert type(failure) is kind
        again = pickle.loads(pickle.dumps(failure))
        assert (type(again), str(again)) == (kind, str(failure))
        assert str(failure).startswith("vllm-0: ")
    mine = StaleWeightsError("mine")
    assert converted(mine, "vllm-0", "sampling") is mine
    outer = RuntimeError()
    outer.__cause__ = OSError("the first cause")
    assert causes(outer) == "RuntimeError ← OSError: the first cause"


def test_waiting_ends_with_the_first_of_answer_trouble_and_deadline() -> None:
    async def run() -> None:
        dead, stale = Trouble(), Trouble()
        cancelled: list[str] = []

        async def answer(after_s: float, value: str) -> str:
            try:
                await asyncio.sleep(after_s)
            except asyncio.CancelledError:
                cancelled.append(value)
                raise
            return value

        def wait(work: Any, timeout_s: float = 30.0) -> Any:
            return guarded(work, (dead, stale), component="vllm-0", what="x", timeout_s=timeout_s)

        async def raising() -> None:
            raise ValueError("odd")

        assert await wait(answer(0, "fast")) == "fast"
        with pytest.raises(DeadlineError, match=r"vllm-0: x did not end within 0\.01 s"):
            await wait(answer(30, "late"), 0.01)
        with pytest.raises(InvalidRequestError, match="odd"):
            await wait(raising())
        asyncio.get_running_loop().call_later(0.01, stale.report, StaleWeightsError, "old")
        with pytest.raises(StaleWeightsError, match="old"):
            await wait(answer(30, "old"))
        dead.report(EngineDeadError, "killed")
        dead.report(EngineDeadError, "again")
        with pytest.raises(EngineDeadError, match="killed"):
            await wait(answer(0, "dead"))
        stale.clear()
        outer = asyncio.ensure_future(
            guarded(answer(30, "given up"), (stale,), component="vllm-0", what="x", timeout_s=30)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert cancelled == ["late", "old", "given up"]

    asyncio.run(run())


def test_the_environment_is_for_fast_starts_on_cpus_and_what_is_set_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    values = environment_for(VllmSettings("m", cpu_threads=3, start_timeout_s=33), cpu=True)
    assert (values["OMP_NUM_THREADS"], values["TORCHDYNAMO_DISABLE"]) == ("3", "1")
    assert values["VLLM_ENGINE_READY_TIMEOUT_S"] == "33"
    assert values["VLLM_NO_USAGE_STATS"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment_for(VllmSettings("m", eager=False), cpu=True)
    assert "OMP_NUM_THREADS" not in environment_for(VllmSettings("m"), cpu=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert environment_for(VllmSettings("m"), cpu=True)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    assert dict(os.environ) == before


def test_the_build_is_told_by_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, str] = {}

    def find(name: str) -> Any:
        if name not in installed:
            raise environment.PackageNotFoundError(name)
        return SimpleNamespace(version=installed[name])

    monkeypatch.setattr(environment.Distribution, "from_name", find)
    with pytest.raises(UnavailableBackendError, match="vllm-cpu"):
        is_cpu_build()
    installed["vllm"] = "0.32.0"
    assert not is_cpu_build()
    installed["vllm"] = "0.32.0+cpu"
    assert is_cpu_build()
    installed["vllm"], installed["vllm-cpu"] = "0.32.0", "0.32.0"
    assert is_cpu_build()


def test_a_fork_is_made_only_where_the_child_needs_no_threads() -> None:
    assert start_method(True, 1, None) == "fork"
    assert start_method(True, 2, None) == start_method(False, 1, None) == "spawn"
    assert start_method(False, 1, "fork") == "fork"


def test_g1_g2_all_of_vllms_caches_are_emptied_and_one_that_is_not_is_an_error() -> None:
    class Engine:
        emptied = True

        def __init__(self) -> None:
            self.calls: list[tuple[str, dict[str, Any]]] = []

        def __getattr__(self, name: str) -> Any:
            async def call(**arguments: Any) -> bool:
                self.calls.append((name, arguments))
                return self.emptied

            return call

    driver = AsyncDriver(VllmSettings("m"), cpu=True)
    driver._engine = engine = Engine()
    asyncio.run(driver.drop_caches())
    assert engine.calls == [
        ("reset_prefix_cache", {"reset_running_requests": True}),
        ("reset_mm_cache", {}),
        ("reset_encoder_cache", {}),
    ]
    engine.emptied = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        asyncio.run(driver.drop_caches())


ORPHAN = """
import multiprocessing, os, runpy, sys, threading, time

die_with_parent = runpy.run_path(sys.argv[2])["die_with_parent"]

def child(owner, pipe, tied):
    if tied:
        die_with_parent(owner)
    pipe.send(os.getpid())
    time.sleep(60)

def make(owner, pids, wait_s):
    context = multiprocessing.get_context("fork")
    for tied in (True, False):
        here, there = context.Pipe()
        context.Process(target=child, args=(owner, there, tied)).start()
        pids.append(here.recv())
    time.sleep(wait_s)

if __name__ == "__main__":
    die_with_parent(os.getpid())
    pids = []
    maker = threading.Thread(target=make, args=(os.getpid(), pids, float(sys.argv[1])), daemon=True)
    maker.start()
    while len(pids) < 2:
        time.sleep(0.01)
    if sys.argv[1] == "0":
        maker.join()
    print(*pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("ends", ["the thread", "the process"])
def test_a_tied_process_ends_with_the_thread_that_made_it(tmp_path: Path, ends: str) -> None:
    from rl_generation.vllm.processes import kill_all, wait_until_dead

    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    wait_s = "0" if ends == "the thread" else "60"
    command = [sys.executable, str(script), wait_s, parentage.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        tied, free = (int(word) for word in owner.stdout.readline().split())
        try:
            if ends == "the process":
                owner.kill()
                owner.wait(30)
            assert wait_until_dead([tied], 10.0) == []
            assert wait_until_dead([free], 0.0) == [free]
        finally:
            kill_all([free, owner.pid])
