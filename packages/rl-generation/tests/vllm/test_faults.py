"""The engine's process dies at any time, or its owner does: typed failures, no orphan, no old token."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_generation.failures import EngineDeadError, GenerationError, InfraError, StaleWeightsError
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.publisher import TensorSource
from rl_generation.refit.settings import TransportSettings
from rl_generation.vllm import VllmEngine
from rl_generation.vllm.processes import descendants, is_alive, wait_until_dead

tools = importlib.import_module("packages.rl-generation.tests.vllm.lab")
reach, requests_of, settings_for = tools.reach, tools.requests_of, tools.settings_for

pytestmark = pytest.mark.faults
N = int(os.environ.get("RL_FAULTS_N", "2"))
DEADLINE_S = 3.0
"""From a kill to a typed failure; it takes milliseconds, but the machine may be busy."""


@pytest.fixture(scope="module")
def lab(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = model_folder("tied")
    lab = tools.Lab(
        VllmEngine(settings_for(folder, "vllm-dies", control_timeout_s=20.0)),
        folder,
        tools.Reference(folder, tmp_path_factory.mktemp("states")),
    )
    lab.engine.start()
    yield lab
    lab.engine.shutdown(20.0)


async def idle(lab: Any, kill: Callable[[], None]) -> None:
    kill()
    while (await lab.engine.health_async())["state"] != "dead":
        await asyncio.sleep(0.002)
    with pytest.raises(EngineDeadError):
        await lab.engine.generate_async(requests_of(1)[0])


async def serving(lab: Any, kill: Callable[[], None]) -> None:
    before = (await lab.engine.health_async())["sampled_tokens"]
    pending = [asyncio.ensure_future(lab.engine.generate_async(request)) for request in requests_of(8, 90)]
    await reach(lab.engine, before + 8)
    kill()
    for answer in await asyncio.gather(*pending, return_exceptions=True):
        assert type(answer) is EngineDeadError, answer


async def refitting(lab: Any, kill: Callable[[], None]) -> None:
    state = lab.reference.state
    spec = spec_of_tensors(state.items())
    source = TensorSource(lambda: spec.tensors, state.items, TransportSettings(bucket_bytes=1 << 14))
    try:
        await lab.engine.begin_refit(source.begin("shared_memory"), lab.engine.weight_version + 1)
        pending = asyncio.ensure_future(lab.engine.generate_async(requests_of(1)[0]))
        bucket = source.next_bucket()
        assert bucket is not None
        await lab.engine.load_bucket(bucket)
        bucket = source.next_bucket()
        assert bucket is not None
        loading = asyncio.ensure_future(lab.engine.load_bucket(bucket))
        await asyncio.sleep(0)
        kill()
        for step in (loading, lab.engine.finish_refit()):
            with contextlib.suppress(EngineDeadError):
                # The bytes may have been there before the signal was.
                assert await step is None
        with pytest.raises(EngineDeadError):
            await lab.engine.finish_refit()
        with pytest.raises(EngineDeadError):
            await pending
    finally:
        source.end()


@pytest.mark.parametrize("moment", [idle, serving, refitting], ids=lambda moment: moment.__name__)
def test_a_killed_engine_fails_typed_in_time_and_comes_back_stale(
    lab: Any, moment: Callable[[Any, Callable[[], None]], Any]
) -> None:
    for _ in range(N):
        pid = lab.engine.health()["pid"]
        family = descendants([pid])
        killed_at = 0.0

        def kill(pid: int = pid) -> None:
            nonlocal killed_at
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()

        async def run(kill: Callable[[], None] = kill) -> None:
            await asyncio.wait_for(moment(lab, kill), 30)

        asyncio.run(run())
        assert time.monotonic() - killed_at < DEADLINE_S
        for call in (lab.engine.pause, lab.engine.wake):
            with pytest.raises(EngineDeadError, match=f"process {pid}"):
                call()
        assert wait_until_dead(family, 5.0) == []

        lab.engine.start(stale=True)
        with pytest.raises(StaleWeightsError):
            lab.engine.generate(requests_of(1))
        lab.engine.update_weights(lab.reference.state.items(), 0)
        requests = requests_of(4)
        completions = lab.engine.generate(requests)
        assert lab.reference.worst(requests, completions) < 5e-5


def test_failures_are_read_without_vllm(lab: Any) -> None:
    engine = VllmEngine(settings_for(lab.folder / "nowhere", "vllm-lost", start_timeout_s=60.0))
    with pytest.raises(GenerationError, match="vllm-lost") as caught:
        engine.start()
    failure = caught.value
    assert "nowhere" in str(failure)
    script = (
        "import pickle, sys; failure = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'vllm']; "
        "print(type(failure).__name__)"
    )
    raw = pickle.dumps(failure).hex()
    done = subprocess.run([sys.executable, "-c", script, raw], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == type(failure).__name__, done.stderr


def test_a_process_that_is_not_up_in_time_is_ended(lab: Any) -> None:
    engine = VllmEngine(settings_for(lab.folder, "vllm-late", start_timeout_s=0.05))
    before = set(descendants([os.getpid()]))
    with pytest.raises(InfraError, match="vllm-late"):
        engine.start()
    assert wait_until_dead(set(descendants([os.getpid()])) - before, 5.0) == []


def test_shutdown_leaves_no_process_and_is_idempotent(lab: Any) -> None:
    engine = VllmEngine(settings_for(lab.folder, "vllm-ends"))
    facts = engine.start()
    family = descendants([facts.pid])
    begun = time.monotonic()
    engine.shutdown(20.0)
    assert time.monotonic() - begun < 20.0
    assert [pid for pid in family if is_alive(pid)] == []
    engine.shutdown(1.0)
    with pytest.raises(GenerationError, match=r"shutdown\(\)"):
        engine.generate(requests_of(1))


def test_shutdown_does_not_wait_for_a_thread_of_vllm_that_cleans_up(lab: Any) -> None:
    engine = VllmEngine(settings_for(lab.folder, "vllm-races", control_timeout_s=5.0))
    engine.start()

    async def as_if_vllm_had_seen_it_die(core: Any) -> tuple[Any, ...]:
        # Its thread takes the clean-up and asks the loop to close the sockets, which that request holds.
        client = core._driver.engine.engine_core
        client._finalizer.detach()
        return client.resources.input_socket, client.resources.output_socket

    sockets = asyncio.run(engine.on_engine_loop(as_if_vllm_had_seen_it_die))
    engine.shutdown(10.0)
    gc.collect()
    assert all(socket.closed for socket in sockets)


OWNER = """
import importlib, sys, time
sys.path.insert(0, {root!r})
tools = importlib.import_module("packages.rl-generation.tests.vllm.lab")
from rl_generation.vllm import VllmEngine

if __name__ == "__main__":
    engines = [
        VllmEngine(tools.settings_for({folder!r}, f"vllm-{{method}}", start_method=method))
        for method in sys.argv[2:]
    ]
    print("pids", *[engine.start().pid for engine in engines], flush=True)
    engines[0].generate(tools.requests_of(2))
    if sys.argv[1] == "stay":
        time.sleep(120)
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("ending", "methods", "code"),
    [("stay", ["fork", "spawn"], -signal.SIGKILL), ("leave", ["fork"], 3)],
    ids=["killed", "ends by itself"],
)
def test_no_engine_outlives_its_owner_outside_ray(
    lab: Any, tmp_path: Path, ending: str, methods: list[str], code: int
) -> None:
    root = str(Path(__file__).resolve().parents[4])
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(root=root, folder=str(lab.folder)))
    log = tmp_path / "stderr"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(script), ending, *methods], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as owner,
    ):
        assert owner.stdout is not None
        # vLLM writes there, too.
        line = next((line for line in owner.stdout if line.startswith("pids ")), "")
        pids = [int(word) for word in line.split()[1:]]
        assert len(pids) == len(methods), log.read_text()[-2000:]
        family = descendants(pids)
        if ending == "stay":
            owner.kill()
        assert owner.wait(60) == code
    assert wait_until_dead(family, 10.0) == []
