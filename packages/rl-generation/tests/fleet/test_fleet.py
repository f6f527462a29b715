"""The fleet as others see it: an engine whose methods may be called from any thread or event loop."""

from __future__ import annotations

import ast
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import rl_generation.fleet
from rl_generation.failures import DeadlineError, GenerationError, RefitError
from rl_generation.fleet.fleet import Fleet
from rl_generation.fleet.settings import FleetSettings
from rl_generation.protocol import Generation, RefitSpec, RefitTensor
from rl_generation.refit.manifest import spec_of_tensors
from rl_generation.refit.receive import BucketReader

FAST = FleetSettings(probe_interval_s=0.1, probe_timeout_s=0.5)


@pytest.fixture
def fleet(scripted_replica):
    with Fleet(
        [scripted_replica("a", "http://h:1/v1"), scripted_replica("b", "http://h:2/v1")], FAST
    ) as made:
        made.start()
        yield made


def test_it_is_a_generation(fleet, make_requests) -> None:
    assert isinstance(fleet, Generation)
    assert fleet.base_urls == fleet.reserve() == ["http://h:1/v1", "http://h:2/v1"]
    assert fleet.weight_version == 0
    assert [c.token_ids for c in fleet.generate(make_requests(9))] == [(i,) for i in range(9)]
    fleet.pause()
    assert fleet.health()["state"] == "paused"
    fleet.resume()
    fleet.sleep()
    fleet.wake()
    assert fleet.states == {"a": "healthy", "b": "healthy"}
    assert fleet.metrics()["tokens"] == 9


def test_any_thread_and_any_loop_may_ask(fleet, make_requests) -> None:
    async def from_a_loop(first: int) -> list[int]:
        answers = await asyncio.gather(
            *(fleet.generate_async(request) for request in make_requests(5, first))
        )
        return [answer.token_ids[0] for answer in answers]

    with ThreadPoolExecutor(8) as pool:
        sync = list(pool.map(lambda i: fleet.generate(make_requests(3, 100 * i)), range(8)))
        loops = list(pool.map(lambda i: asyncio.run(from_a_loop(100 * i)), range(8)))
    assert [[a.token_ids[0] for a in answers] for answers in sync] == [
        [100 * i, 100 * i + 1, 100 * i + 2] for i in range(8)
    ]
    assert loops == [[100 * i + k for k in range(5)] for i in range(8)]


def test_cancelling_an_awaited_request_ends_it(fleet, make_requests) -> None:
    async def scene() -> None:
        for member in fleet._core.members.values():
            member.replica.latency_s = 30.0
        call = asyncio.ensure_future(fleet.generate_async(make_requests(1)[0]))
        await asyncio.sleep(0.05)
        assert sum(r["outstanding"] for r in fleet.health()["replicas"].values()) == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sum(r["outstanding"] for r in fleet.health()["replicas"].values()) == 0

    asyncio.run(scene())


def test_a_stream_of_this_process_reaches_every_replica_byte_for_byte(fleet) -> None:
    """Through the real publisher and real shared memory; the doubles read what an engine would read."""
    weights = {f"layer.{i}.weight": torch.randn(40, 30 + i) for i in range(5)}
    got: dict[str, dict[str, torch.Tensor]] = {}
    for name, member in fleet._core.members.items():
        reader, mine, original = BucketReader(), got.setdefault(name, {}), member.replica.load_bucket

        async def load(bucket, reader=reader, mine=mine, original=original) -> None:
            mine.update({key: tensor.clone() for key, tensor in reader.tensors(bucket)})
            await original(bucket)

        member.replica.load_bucket = load
    with pytest.raises(GenerationError, match=r"before prepare_refit"):
        fleet.update_weights(weights.items(), 1)
    fleet.prepare_refit(spec_of_tensors(weights.items()))
    fleet.update_weights(weights.items(), 1)
    assert fleet.weight_version == 1
    assert fleet.metrics()["refit_seconds"] > 0
    for mine in got.values():
        assert mine.keys() == weights.keys()
        assert all(torch.equal(mine[key], weights[key]) for key in weights)


def test_a_stream_that_is_not_what_was_announced_is_refused(fleet) -> None:
    fleet.prepare_refit(
        RefitSpec((RefitTensor("a", (2,), torch.float32), RefitTensor("b", (2,), torch.float32)))
    )
    with pytest.raises(RefitError, match="b"):
        fleet.update_weights([("a", torch.ones(2))], 1)
    assert fleet.weight_version == 0


def test_sources_of_others_work_from_any_thread(fleet, source, make_requests) -> None:
    assert fleet.update_from(source(), 4) == ["a", "b"]
    assert fleet.refit_stale(source()) == []
    assert {c.weight_version for c in fleet.generate(make_requests(4))} == {4}


def test_after_shutdown_everything_says_so(scripted_replica, make_requests) -> None:
    fleet = Fleet([scripted_replica("a")], FAST)
    with pytest.raises(GenerationError, match="it is new; call start"):
        fleet.generate(make_requests(1))
    fleet.start()
    before = {thread for thread in threading.enumerate() if thread.name == "fleet"}
    assert before
    fleet.shutdown(5.0)
    fleet.shutdown(5.0)
    assert not before & set(threading.enumerate())
    for call in (lambda: fleet.generate(make_requests(1)), fleet.health, fleet.start, fleet.pause):
        with pytest.raises(GenerationError, match=r"used after shutdown\(\)"):
            call()


def test_a_call_on_the_fleets_own_loop_does_not_wait_for_itself(fleet, make_requests) -> None:
    async def wrong() -> None:
        fleet.generate(make_requests(1))

    with pytest.raises(GenerationError, match="on its own event loop; await it"):
        fleet._loop.call(wrong(), "wrong", 5.0)


def test_a_loop_that_is_stuck_is_not_waited_for(scripted_replica) -> None:
    fleet = Fleet([scripted_replica("a")], FAST)

    async def slow() -> None:
        await asyncio.sleep(30)

    with pytest.raises(DeadlineError, match=r"slow did not end within 0\.05 s"):
        fleet._loop.call(slow(), "slow", 0.05)
    fleet.shutdown(2.0)


def test_importing_the_fleet_imports_no_ray() -> None:
    """Ray is imported inside functions, when an actor is really wanted."""
    folder = Path(rl_generation.fleet.__file__).parent
    for file in folder.glob("*.py"):
        top = [
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom) and not node.level}
        assert not {name.partition(".")[0] for name in names} & {"ray", "rl_actor_envs"}, file.name
