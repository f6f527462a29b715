"""Addresses, start, pause, sleep and the end of a fleet."""

from __future__ import annotations

import asyncio

import pytest

from rl_generation.failures import (
    BusyError,
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    UnschedulableError,
)
from rl_generation.fleet.core import FleetCore
from rl_generation.fleet.settings import FleetSettings


def core(replicas, settings: FleetSettings | None = None) -> FleetCore:
    return FleetCore(replicas, settings or FleetSettings(), asyncio.get_running_loop().time)


def test_f3_no_server_is_an_empty_list_and_addresses_are_known_before_the_load(run, scripted_replica) -> None:
    async def scene() -> None:
        without = core([scripted_replica("a"), scripted_replica("b")])
        with pytest.raises(GenerationError, match="not reserved"):
            _ = without.base_urls
        assert await without.reserve() == []

        replicas = [scripted_replica("a", "http://h:1/v1"), scripted_replica("b", "http://h:2/v1")]
        both = core(replicas)
        assert await both.reserve() == ["http://h:1/v1", "http://h:2/v1"] == both.base_urls
        assert "start" not in replicas[0].calls
        await both.start()
        assert [replica.calls["reserve"] for replica in replicas] == [1, 1]
        await both.shutdown(5.0)

    run(scene())


def test_f3_a_list_with_holes_names_the_shard(run, scripted_replica) -> None:
    async def scene() -> None:
        replicas = [scripted_replica("a", "http://h:1/v1"), scripted_replica("b"), scripted_replica("c")]
        fleet = core(replicas)
        with pytest.raises(GenerationError, match="fleet: b, c reserved no address"):
            await fleet.reserve()
        with pytest.raises(GenerationError, match="fleet: b, c reserved no address"):
            await fleet.start()

    run(scene())


def test_a_restarted_replica_reserves_again(run, scripted, make_requests, caplog) -> None:
    async def scene() -> None:
        async with scripted(1) as fleet:
            fleet.replicas[0].alive = False
            fleet.replicas[0].url = "http://h:9/v1"
            await fleet.core.generate(make_requests(1))
            assert fleet.core.base_urls == ["http://h:9/v1"]

    run(scene())


def test_replicas_start_at_the_same_time(run, scripted_replica) -> None:
    async def scene() -> None:
        replicas = [scripted_replica(f"r{i}") for i in range(8)]
        for replica in replicas:
            replica.start_s = 60.0
        fleet = core(replicas)
        began = asyncio.get_running_loop().time()
        await fleet.start()
        assert asyncio.get_running_loop().time() - began == pytest.approx(60.0, abs=0.1)
        await fleet.shutdown(5.0)

    run(scene())


def test_a_failing_start_ends_all_and_raises_the_first_cause(run, scripted_replica) -> None:
    async def scene() -> None:
        replicas = [scripted_replica("a"), scripted_replica("b")]
        replicas[0].start_s = 500.0
        cause = UnschedulableError("b: no node has 1 GPU")
        replicas[1].faults["start"] = [cause]
        fleet = core(replicas)
        began = asyncio.get_running_loop().time()
        with pytest.raises(UnschedulableError) as caught:
            await fleet.start()
        assert caught.value is cause
        assert asyncio.get_running_loop().time() - began < 1.0
        assert [replica.calls["kill"] for replica in replicas] == [1, 1]
        with pytest.raises(GenerationError, match="it is closed; build a new fleet"):
            await fleet.start()

    run(scene())


def test_a_start_has_a_deadline_and_versions_have_to_agree(run, scripted_replica) -> None:
    async def scene() -> None:
        replica = scripted_replica("a")
        replica.hangs.add("start")
        with pytest.raises(DeadlineError, match="replica a: start did not end within 30 s"):
            await core([replica], FleetSettings(start_timeout_s=30.0)).start()
        others = [scripted_replica("a"), scripted_replica("b")]
        original = others[1].start

        async def newer(*, stale: bool = False):
            facts = await original(stale=stale)
            return type(facts)(facts.max_context, facts.vocab_size, 3, facts.pid)

        others[1].start = newer
        with pytest.raises(GenerationError, match=r"different versions: \{'a': 0, 'b': 3\}"):
            await core(others).start()

    run(scene())


def test_names_differ_and_somebody_is_there(run, scripted_replica) -> None:
    async def scene() -> None:
        with pytest.raises(ValueError, match="at least one replica"):
            core([])
        with pytest.raises(ValueError, match="different names, got a, a"):
            core([scripted_replica("a"), scripted_replica("a")])

    run(scene())


def test_a_refit_that_one_dead_replica_would_fail_for_all_is_refused_at_once(run, scripted_replica) -> None:
    """A collective counts its members before anybody knows who is alive."""

    async def scene() -> None:
        settings = FleetSettings(transport="collective")
        with pytest.raises(ValueError, match=r"'collective' for 2 replicas.*shared_memory.*object_store"):
            core([scripted_replica("a"), scripted_replica("b")], settings)
        assert core([scripted_replica("a")], settings).version == 0

    run(scene())


def test_a_paused_fleet_lets_requests_wait(run, scripted, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            await fleet.core.pause()
            await fleet.core.pause()
            assert [replica.calls["pause"] for replica in fleet.replicas] == [1, 1]
            call = asyncio.ensure_future(fleet.core.generate(make_requests(2)))
            await asyncio.sleep(30)
            assert not call.done()
            # Probes would only find that nothing is sampled.
            assert fleet.replicas[0].calls.get("probe", 0) == 0
            await fleet.core.resume()
            assert len(await call) == 2
            await fleet.core.pause()
            with pytest.raises(GenerationError, match="it is paused; call resume"):
                await fleet.core.sleep()

    run(scene())


def test_asleep_it_refuses_and_awake_it_serves(run, scripted, source, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            call = asyncio.ensure_future(fleet.core.generate(make_requests(2)))
            await asyncio.sleep(0)
            with pytest.raises(GenerationError, match="cannot sleep while 1 generations are in flight"):
                await fleet.core.sleep()
            await call
            await fleet.core.sleep()
            for work in (fleet.core.generate(make_requests(1)), fleet.core.refit(source(), 1)):
                with pytest.raises(GenerationError, match="it is asleep; call wake"):
                    await work
            with pytest.raises(GenerationError, match="it is asleep; call wake"):
                await fleet.core.pause()
            await fleet.core.wake()
            assert len(await fleet.core.generate(make_requests(2))) == 2

    run(scene())


def test_one_that_cannot_follow_the_mode_is_started_again_into_it(run, scripted) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            fleet.replicas[1].faults["pause"] = [InfraError("r1: no")]
            await fleet.core.pause()
            assert fleet.states == ["healthy", "dead"]
            await fleet.until(lambda: fleet.states == ["healthy"] * 2)
            assert [replica.calls["pause"] for replica in fleet.replicas] == [1, 2]

    run(scene())


@pytest.mark.parametrize(("stop", "undo"), [("pause", "resume"), ("sleep", "wake")])
@pytest.mark.parametrize("error", [BusyError, GenerationError])
def test_a_refused_change_of_mode_is_undone_and_said(
    run, scripted, make_requests, stop: str, undo: str, error: type[GenerationError]
) -> None:
    """Such as an engine that works on a request over HTTP, or that was not built to sleep."""

    async def scene() -> None:
        async with scripted(3) as fleet:
            fleet.replicas[1].faults[stop] = [error("r1: not now")]
            with pytest.raises(error, match="r1: not now"):
                await getattr(fleet.core, stop)()
            assert fleet.states == ["healthy"] * 3
            assert [replica.calls.get(undo) for replica in fleet.replicas] == [1] * 3
            assert (await fleet.core.health())["state"] == "running"
            assert len(await fleet.core.generate(make_requests(3))) == 3
            await getattr(fleet.core, stop)()
            assert [replica.calls[stop] for replica in fleet.replicas] == [2] * 3

    run(scene())


@pytest.mark.parametrize("stop", ["pause", "sleep"])
@pytest.mark.parametrize("how", [EngineDeadError, DeadlineError, "silent"])
def test_one_that_is_dead_or_silent_keeps_no_fleet_from_its_mode(run, scripted, stop: str, how) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            if how == "silent":
                fleet.replicas[1].hangs.add(stop)
            else:
                fleet.replicas[1].faults[stop] = [how("r1: no")]
            await getattr(fleet.core, stop)()
            assert fleet.states == ["healthy", "dead"]
            fleet.replicas[1].hangs.clear()
            await fleet.until(lambda: fleet.states == ["healthy"] * 2)
            assert [replica.calls[stop] for replica in fleet.replicas] == [1, 2]

    run(scene())


def test_sleep_waits_for_a_probe_that_is_under_way(run, scripted) -> None:
    """The probe's token is a request in flight, which no engine sleeps with."""

    async def scene() -> None:
        async with scripted(2) as fleet:
            replica, probing = fleet.replicas[0], asyncio.Event()
            original = replica.sleep

            async def probe() -> None:
                probing.set()
                await asyncio.sleep(0.1)
                probing.clear()

            async def sleep() -> None:
                if probing.is_set():
                    raise BusyError("r0: a request is in flight")
                await original()

            replica.probe, replica.sleep = probe, sleep
            await probing.wait()
            await fleet.core.sleep()
            assert fleet.states == ["healthy"] * 2
            assert [replica.calls["sleep"] for replica in fleet.replicas] == [1, 1]

    run(scene())


@pytest.mark.parametrize(("stop", "undo"), [("pause", "resume"), ("sleep", "wake")])
@pytest.mark.parametrize("interrupted", ["stop", "undo"])
def test_a_change_of_mode_whose_caller_gave_up_can_be_repeated(
    run, scripted, make_requests, stop: str, undo: str, interrupted: str
) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            name = {"stop": stop, "undo": undo}[interrupted]
            if interrupted == "undo":
                await getattr(fleet.core, stop)()
            fleet.replicas[1].hangs.add(name)
            call = asyncio.ensure_future(getattr(fleet.core, name)())
            await fleet.until(lambda: bool(fleet.replicas[1].calls.get(name)))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert fleet.core.metrics()["serving"] == 0
            fleet.replicas[1].hangs.clear()
            await getattr(fleet.core, name)()
            assert [replica.calls[name] for replica in fleet.replicas] == [2, 2]
            if interrupted == "stop":
                await getattr(fleet.core, undo)()
            assert len(await fleet.core.generate(make_requests(2))) == 2
            assert fleet.states == ["healthy"] * 2

    run(scene())


def test_a_second_start_leaves_the_first_alone(run, scripted, make_requests) -> None:
    async def scene() -> None:
        fleet = scripted(2)
        first, second = await asyncio.gather(fleet.core.start(), fleet.core.start(), return_exceptions=True)
        assert first is None
        assert isinstance(second, GenerationError)
        assert "it is running" in str(second)
        assert len(await fleet.core.generate(make_requests(2))) == 2
        await fleet.core.shutdown(5.0)

    run(scene())


def test_a_fleet_that_is_shut_down_while_it_changes_its_mode_stays_closed(run, scripted) -> None:
    async def scene() -> None:
        async with scripted(1) as fleet:
            await fleet.core.pause()
            fleet.replicas[0].hangs.add("resume")
            call = asyncio.ensure_future(fleet.core.resume())
            await asyncio.sleep(1)
            await fleet.core.shutdown(5.0)
            with pytest.raises(GenerationError, match="closed"):
                await call
            assert (await fleet.core.health())["state"] == "closed"

    run(scene())


def test_a_refit_of_a_paused_fleet_leaves_it_paused(run, scripted, source) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            await fleet.core.pause()
            await fleet.core.refit(source(), 1)
            assert [replica.calls["pause"] for replica in fleet.replicas] == [2, 2]
            assert fleet.core.metrics()["serving"] == 0

    run(scene())


def test_health_names_states_and_survives_a_silent_replica(run, scripted) -> None:
    async def scene() -> None:
        async with scripted(2, FleetSettings(control_timeout_s=1.0)) as fleet:
            fleet.replicas[0].facts = {"engine": "double"}
            fleet.replicas[1].hangs.add("health")
            health = await fleet.core.health()
            assert (health["state"], health["weight_version"], health["serving"]) == ("running", 0, 2)
            assert health["replicas"]["r0"]["engine"] == {"engine": "double"}
            assert health["replicas"]["r0"]["state"] == "healthy"
            assert "did not end within 1 s" in health["replicas"]["r1"]["engine"]["error"]

    run(scene())


def test_shutdown_is_bounded_parallel_and_idempotent(run, scripted, make_requests) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(8) as fleet:
            for replica in fleet.replicas:
                replica.latency_s = 1000.0
                replica.hangs.add("shutdown")
            call = asyncio.ensure_future(fleet.core.generate(make_requests(8)))
            await asyncio.sleep(1)
            began = loop.time()
            await fleet.core.shutdown(10.0)
            assert loop.time() - began <= 10.0
            assert [replica.calls["kill"] for replica in fleet.replicas] == [1] * 8
            with pytest.raises(GenerationError, match="the fleet was shut down"):
                await call
            await fleet.core.shutdown(10.0)
            assert [replica.calls["kill"] for replica in fleet.replicas] == [1] * 8
            with pytest.raises(GenerationError, match="closed"):
                await fleet.core.generate(make_requests(1))
            await asyncio.sleep(1000)
            assert fleet.states == ["retired"] * 8
            assert [replica.calls["start"] for replica in fleet.replicas] == [1] * 8

    run(scene())


def test_nothing_is_started_after_a_shutdown_during_a_restart(run, scripted, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            fleet.replicas[0].alive, fleet.replicas[0].start_s = False, 20.0
            await fleet.core.generate(make_requests(2))
            await fleet.until(lambda: fleet.states[0] == "restarting")
            await fleet.core.shutdown(10.0)
            await asyncio.sleep(100)
            assert fleet.states == ["retired"] * 2
            assert not fleet.replicas[0].alive

    run(scene())
