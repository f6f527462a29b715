"""New weights for a fleet whose replicas fail in every step, and replicas that missed them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import pytest

from rl_generation.failures import (
    EngineDeadError,
    GenerationError,
    InfraError,
    NoReplicaError,
    RefitError,
    StaleWeightsError,
)
from rl_generation.fleet.settings import FleetSettings, RestartPolicy
from rl_generation.fleet.states import ReplicaEvent
from rl_generation.protocol import RefitSpec

QUIET = FleetSettings(probe_interval_s=3600, restarts=RestartPolicy(jitter=0.0), refit_call_timeout_s=2.0)


def test_every_replica_goes_through_all_steps_together(run, scripted, source) -> None:
    async def scene() -> None:
        async with scripted(3) as fleet:
            weights = source()
            assert await fleet.core.refit(weights, 7) == ["r0", "r1", "r2"]
            assert weights.log == ["begin shared_memory", "bucket 1", "bucket 2", "bucket 3", "end"]
            for replica in fleet.replicas:
                assert (replica.version, replica.calls["load_bucket"]) == (7, 3)
                assert "abort_refit" not in replica.calls
            assert (fleet.core.version, fleet.states) == (7, ["healthy"] * 3)
            metrics = fleet.core.metrics()
            assert metrics["refits"] == 1
            for version in (6, 7):
                with pytest.raises(RefitError, match=f"version {version} after version 7; expected a larger"):
                    await fleet.core.refit(source(), version)

    run(scene())


def test_a_bucket_is_published_when_all_have_loaded_those_before_its_window(run, scripted, source) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            weights = source()
            published: dict[str, list[int]] = {"r0": [], "r1": []}
            for replica in fleet.replicas:

                async def load(bucket, replica=replica, original=replica.load_bucket) -> None:
                    await asyncio.sleep(0.5 if replica.name == "r1" else 0.0)
                    await original(bucket)
                    published[replica.name].append(sum("bucket" in entry for entry in weights.log))

                replica.load_bucket = load
            await fleet.core.refit(weights, 1)
            for seen in published.values():
                assert [count < number + weights.window for number, count in enumerate(seen, 1)] == [True] * 3
            # While the slow one loads the first, all is published that may be.
            assert published["r1"][0] == weights.window

    run(scene())


def test_g3_a_restarted_replica_serves_again_after_the_next_refit(
    run, scripted, source, make_requests
) -> None:
    """4 replicas, kill 1, restart, next refit through the real fleet: 4 serve."""

    async def scene() -> None:
        async with scripted(4) as fleet:
            await fleet.core.refit(source(), 1)
            victim = fleet.replicas[2]
            victim.alive = False
            assert len(await fleet.core.generate(make_requests(40))) == 40
            await fleet.until(lambda: fleet.states[2] == "stale")
            assert victim.told_stale == [False, True]
            served = len(victim.served)
            answers = await fleet.core.generate(make_requests(400))
            assert len(victim.served) == served
            assert {answer.weight_version for answer in answers} == {1}
            assert fleet.core.metrics()["serving"] == 3
            assert await fleet.core.refit(source(), 2) == ["r0", "r1", "r2", "r3"]
            assert fleet.core.metrics()["serving"] == 4
            answers = await fleet.core.generate(make_requests(400))
            assert len(victim.served) == served + 100
            assert {answer.weight_version for answer in answers} == {2}

    run(scene())


def test_a_stale_replica_catches_up_alone(run, scripted, source, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            unread = source()
            assert await fleet.core.refit_stale(unread) == []
            assert unread.log == []
            await fleet.core.refit(source(), 3)
            fleet.replicas[0].alive = False
            await fleet.core.generate(make_requests(2))
            await fleet.until(lambda: fleet.states == ["stale", "healthy"])
            busy = asyncio.ensure_future(fleet.core.generate(make_requests(4)))
            assert await fleet.core.refit_stale(source()) == ["r0"]
            assert await busy
            assert fleet.states == ["healthy"] * 2
            assert fleet.core.version == 3
            assert fleet.replicas[1].calls["begin_refit"] == 1

    run(scene())


def test_before_the_first_refit_a_restarted_replica_serves_at_once(run, scripted, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            fleet.replicas[0].alive = False
            await fleet.core.generate(make_requests(2))
            await fleet.until(lambda: fleet.states == ["healthy"] * 2)
            assert fleet.replicas[0].told_stale == [False, False]

    run(scene())


def test_a_refit_during_a_restart_makes_that_start_useless(run, scripted, source, make_requests) -> None:
    """It was not told that it is stale, so its own server would answer with old weights."""

    async def scene() -> None:
        async with scripted(2) as fleet:
            victim = fleet.replicas[0]
            victim.alive, victim.start_s = False, 20.0
            await fleet.core.generate(make_requests(2))
            await fleet.until(lambda: fleet.states[0] == "restarting")
            await fleet.core.refit(source(), 1)
            await fleet.until(lambda: fleet.states[0] == "stale")
            assert victim.told_stale == [False, False, True]
            assert victim.calls["kill"] == 2

    run(scene())


@pytest.mark.parametrize("step", ["begin_refit", "load_bucket", "finish_refit"])
@pytest.mark.parametrize("error", [EngineDeadError, RefitError, InfraError, ZeroDivisionError])
def test_one_that_fails_drops_out_and_the_others_go_on(
    run, scripted, source, make_requests, step: str, error: type[Exception]
) -> None:
    async def scene() -> None:
        async with scripted(3, QUIET) as fleet:
            fleet.replicas[1].faults[step] = [error("r1: no")]
            assert await fleet.core.refit(source(), 1) == ["r0", "r2"]
            assert fleet.core.version == 1
            # Nothing of the new weights has reached it, so it has to go; or it died.
            ended = step != "finish_refit" or error is EngineDeadError
            assert fleet.states == ["healthy", "dead" if ended else "stale", "healthy"]
            answers = await fleet.core.generate(make_requests(30))
            assert {answer.weight_version for answer in answers} == {1}
            assert fleet.replicas[1].served == []
            await fleet.until(lambda: fleet.states[1] == "stale")
            assert await fleet.core.refit(source(), 2) == ["r0", "r1", "r2"]

    run(scene())


def test_one_that_fails_halfway_is_stale_and_lives(run, scripted, source) -> None:
    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            original, loads = fleet.replicas[1].load_bucket, iter((False, True))

            async def load(bucket) -> None:
                if next(loads):
                    raise RefitError("r1: layer.1.weight has another shape")
                await original(bucket)

            fleet.replicas[1].load_bucket = load
            assert await fleet.core.refit(source(), 1) == ["r0"]
            assert fleet.states == ["healthy", "stale"]
            assert fleet.replicas[1].calls["abort_refit"] == 1
            assert "kill" not in fleet.replicas[1].calls

    run(scene())


@pytest.mark.parametrize("step", ["begin_refit", "load_bucket", "finish_refit", "abort_refit"])
def test_one_that_hangs_is_dead_after_the_steps_deadline(run, scripted, source, step: str) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(2, QUIET) as fleet:
            if step == "abort_refit":
                fleet.replicas[0].faults["finish_refit"] = [RefitError("r0: layer.2.weight never came")]
            fleet.replicas[0].hangs.add(step)
            began, weights = loop.time(), source()
            assert await fleet.core.refit(weights, 1) == ["r1"]
            # A bucket may wait behind another one of its window.
            calls = weights.window if step == "load_bucket" else 1
            assert loop.time() - began == pytest.approx(2.0 * calls, abs=0.5)
            assert fleet.states == ["dead", "healthy"]

    run(scene())


def test_an_acknowledgement_that_differs_is_no_acknowledgement(run, scripted, source) -> None:
    """The engine believes that it is fine and would serve, so it is ended."""

    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            fleet.replicas[0].wrong_digest = True
            assert await fleet.core.refit(source(), 1) == ["r1"]
            assert fleet.states == ["dead", "healthy"]
            fleet.replicas[0].wrong_digest = False
            await fleet.until(lambda: fleet.states == ["stale", "healthy"])
            finish = fleet.replicas[1].finish_refit

            async def older():
                ack = await finish()
                return type(ack)(ack.replica, ack.version - 1, ack.digest)

            fleet.replicas[1].finish_refit = older
            assert await fleet.core.refit(source(), 2) == ["r0"]
            assert fleet.states == ["healthy", "dead"]

    run(scene())


def test_nobody_completes_it(run, scripted, source, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            for replica in fleet.replicas:
                replica.faults["begin_refit"] = [RefitError(f"{replica.name}: head.weight is unknown")]
            weights = source()
            with pytest.raises(RefitError, match=r"no replica completed.*r0: head.*r1: head") as caught:
                await fleet.core.refit(weights, 1)
            assert "r0: head.weight" in str(caught.value.__cause__)
            assert weights.log == ["begin shared_memory", "end"]
            # They refused before a weight moved, so they go on with what they had.
            assert (fleet.states, fleet.core.version) == (["healthy"] * 2, 0)
            assert {a.weight_version for a in await fleet.core.generate(make_requests(2))} == {0}

    run(scene())


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_source_that_breaks_leaves_known_states(
    run, scripted, source, make_requests, fails_at: int
) -> None:
    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            weights = source(fails_at)
            with pytest.raises(
                GenerationError, match=r"next_bucket of the source.*the stream broke"
            ) as caught:
                await fleet.core.refit(weights, 1)
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert weights.log[-1] == "end"
            assert [replica.calls["abort_refit"] for replica in fleet.replicas] == [1, 1]
            assert fleet.core.version == 0
            assert fleet.states == (["stale"] if fails_at else ["healthy"]) * 2
            assert await fleet.core.refit(source(), 1) == ["r0", "r1"]
            assert {a.weight_version for a in await fleet.core.generate(make_requests(2))} == {1}

    run(scene())


def test_a_refit_that_its_source_refused_leaves_the_other_one_alone(run, scripted, source) -> None:
    """Whoever did not begin has nothing to end: the source serves another fleet's refit meanwhile."""

    async def scene() -> None:
        async with scripted(1) as fleet:
            weights = source()

            def refuse(transport: str) -> RefitSpec:
                raise RefitError("policy: begin was called during a refit; call end first")

            weights.begin = refuse
            with pytest.raises(RefitError, match="call end first"):
                await fleet.core.refit(weights, 1)
            assert weights.log == []

    run(scene())


def test_a_source_that_begins_when_nobody_waits_any_more_is_ended(scripted, source) -> None:
    release, begun = threading.Event(), threading.Event()
    settings = dataclasses.replace(QUIET, source_timeout_s=0.1)

    async def scene() -> None:
        async with scripted(1, settings) as fleet:
            weights = source()
            original, end = weights.begin, weights.end

            def begin(transport: str) -> RefitSpec:
                release.wait(10)
                return original(transport)

            def ended() -> None:
                end()
                begun.set()

            weights.begin, weights.end = begin, ended
            with pytest.raises(GenerationError, match="begin of the source"):
                await fleet.core.refit(weights, 1)
            assert weights.log == []
            release.set()
            assert await asyncio.to_thread(begun.wait, 10)
            assert weights.log == ["begin shared_memory", "end"]

    asyncio.run(scene())


def test_a_silent_source_has_a_deadline(scripted, source) -> None:
    """In real time, because the source blocks a real thread."""
    import threading

    release = threading.Event()

    async def scene() -> None:
        settings = FleetSettings(source_timeout_s=0.2, probe_interval_s=3600)
        async with scripted(1, settings) as fleet:
            fleet.replicas[0].start_s = 0.0
            weights = source()
            weights.next_bucket = lambda: release.wait(10)
            with pytest.raises(GenerationError, match=r"next_bucket of the source.*within 0.2 s"):
                await fleet.core.refit(weights, 1)
            release.set()
            assert fleet.states == ["healthy"]

    asyncio.run(scene())


def test_a_caller_who_gives_up_leaves_no_refit_behind(run, scripted, source) -> None:
    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            fleet.replicas[1].hangs.add("load_bucket")
            weights = source()
            call = asyncio.ensure_future(fleet.core.refit(weights, 1))
            await fleet.until(lambda: bool(fleet.replicas[1].calls.get("load_bucket")))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await fleet.until(lambda: weights.log[-1] == "end")
            assert [replica.calls["abort_refit"] for replica in fleet.replicas] == [1, 1]
            assert fleet.states == ["stale"] * 2
            fleet.replicas[1].hangs.clear()
            assert await fleet.core.refit(source(), 1) == ["r0", "r1"]

    run(scene())


def test_giving_up_while_a_refit_begins_holds_no_replica(run, scripted, source, make_requests) -> None:
    """One has begun and samples nothing until it is told that the refit is off; the other is slow."""

    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            fleet.replicas[1].hangs.add("begin_refit")
            call = asyncio.ensure_future(fleet.core.refit(source(), 1))
            await fleet.until(lambda: bool(fleet.replicas[1].calls.get("begin_refit")))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await fleet.until(lambda: all(r.calls.get("abort_refit") == 1 for r in fleet.replicas))
            assert fleet.states == ["healthy"] * 2
            assert {a.weight_version for a in await fleet.core.generate(make_requests(2))} == {0}
            fleet.replicas[1].hangs.clear()
            assert await fleet.core.refit(source(), 1) == ["r0", "r1"]

    run(scene())


def test_one_that_refuses_to_begin_keeps_its_weights_when_nobody_gets_new_ones(run, scripted, source) -> None:
    """Such as one whose requests in flight have to end first and do not: it serves what the fleet serves."""

    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            fleet.replicas[0].faults["begin_refit"] = [RefitError("r0: a pause did not end within 60 s")]
            with pytest.raises(GenerationError, match="the stream broke"):
                await fleet.core.refit(source(1), 1)
            assert fleet.states == ["healthy", "stale"]
            assert "kill" not in fleet.replicas[0].calls

    run(scene())


def test_giving_up_before_the_last_acknowledgement_ends_who_may_serve_the_new_weights(
    run, scripted, source
) -> None:
    """The first one has finished and would serve version 1 in a fleet of version 0."""

    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            fleet.replicas[1].hangs.add("finish_refit")
            call = asyncio.ensure_future(fleet.core.refit(source(), 1))
            await fleet.until(lambda: bool(fleet.replicas[1].calls.get("finish_refit")))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert fleet.core.version == 0
            await fleet.until(lambda: fleet.states == ["healthy"] * 2)
            assert [replica.calls["kill"] for replica in fleet.replicas] == [1, 1]
            assert [replica.version for replica in fleet.replicas] == [0, 0]

    run(scene())


def test_requests_in_flight_keep_their_replica_and_new_ones_wait(
    run, scripted, source, make_requests
) -> None:
    async def scene() -> None:
        async with scripted(1, QUIET) as fleet:
            replica = fleet.replicas[0]
            replica.latency_s = 2.0
            loading = asyncio.Event()
            original = replica.load_bucket

            async def load(bucket) -> None:
                loading.set()
                await asyncio.sleep(0.5)
                await original(bucket)

            replica.load_bucket = load
            old = asyncio.ensure_future(fleet.core.generate(make_requests(1)))
            await asyncio.sleep(0.1)
            refit = asyncio.ensure_future(fleet.core.refit(source(), 1))
            await loading.wait()
            new = asyncio.ensure_future(fleet.core.generate(make_requests(1, first=9)))
            await asyncio.sleep(0.4)
            assert replica.calls["generate"] == 1
            await refit
            assert [a.token_ids for a in await old] == [(0,)]
            assert [(a.token_ids, a.weight_version) for a in await new] == [((9,), 1)]
            assert [state for state, _ in replica.served] == ["healthy"] * 2

    run(scene())


def test_a_failed_refit_sends_the_requests_in_flight_elsewhere(run, scripted, source, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            for replica in fleet.replicas:
                replica.latency_s = 50.0
            calls = asyncio.ensure_future(fleet.core.generate(make_requests(2)))
            await asyncio.sleep(0.1)
            fleet.replicas[0].faults["finish_refit"] = [RefitError("r0: lost")]
            await fleet.core.refit(source(), 1)
            fleet.replicas[1].latency_s = 0.1
            answers = await calls
            assert [answer.token_ids for answer in answers] == [(0,), (1,)]
            assert fleet.replicas[1].calls["generate"] == 2

    run(scene())


def test_tokens_of_an_old_version_are_never_returned(run, scripted, source, make_requests) -> None:
    """A replica that forgot its refit without anybody noticing."""

    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            await fleet.core.refit(source(), 5)
            fleet.replicas[0].version = 4
            answers = await fleet.core.generate(make_requests(20))
            assert {answer.weight_version for answer in answers} == {5}
            assert fleet.states == ["stale", "healthy"]

    run(scene())


@pytest.mark.parametrize("notices", ["request", "probe"])
def test_an_engine_that_says_that_it_is_stale_is_believed(
    run, scripted, source, make_requests, notices: str
) -> None:
    async def scene() -> None:
        async with scripted(2, QUIET) as fleet:
            method = {"request": "generate", "probe": "probe"}[notices]
            fleet.replicas[0].faults[method] = [StaleWeightsError("r0: stale")] * 3
            if notices == "request":
                assert len(await fleet.core.generate(make_requests(2))) == 2
            else:
                await fleet.core._supervisor.probe_once()
            assert fleet.states == ["stale", "healthy"]
            # Being stale is no reason to end it.
            await fleet.core._supervisor.probe_once()
            await fleet.core._supervisor.probe_once()
            assert fleet.states == ["stale", "healthy"]

    run(scene())


def test_a_refit_waits_for_a_replica_to_come_back(run, scripted, source, make_requests) -> None:
    async def scene() -> None:
        async with scripted(1) as fleet:
            await fleet.core.refit(source(), 1)
            fleet.replicas[0].alive = False
            fleet.core.members["r0"].report(ReplicaEvent.DIED)
            assert await fleet.core.refit(source(), 2) == ["r0"]
            assert fleet.core.version == 2
            fleet.replicas[0].start_s = 1000.0
            fleet.core.members["r0"].report(ReplicaEvent.DIED)
            with pytest.raises(NoReplicaError, match="no replica can take new weights"):
                await fleet.core.refit(source(), 3)

    run(scene())


def test_probes_keep_quiet_during_a_refit(run, scripted, source) -> None:
    async def scene() -> None:
        settings = FleetSettings(probe_interval_s=0.05, probe_timeout_s=0.1)
        async with scripted(2, settings) as fleet:
            for replica in fleet.replicas:
                original = replica.load_bucket

                async def load(bucket, original=original, replica=replica) -> None:
                    replica.hangs.add("probe")
                    await asyncio.sleep(1.0)
                    await original(bucket)
                    replica.hangs.discard("probe")

                replica.load_bucket = load
            assert await fleet.core.refit(source(), 1) == ["r0", "r1"]
            await asyncio.sleep(1.0)
            assert fleet.states == ["healthy"] * 2
            assert fleet.core.metrics()["restarts"] == 0

    run(scene())


def test_a_replica_that_never_comes_back_is_retired(run, scripted, make_requests, caplog) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(2) as fleet:
            victim = fleet.replicas[0]
            victim.faults["start"] = [InfraError("r0: no memory")] * 9
            victim.alive = False
            began = loop.time()
            await fleet.core.generate(make_requests(2))
            await fleet.until(lambda: fleet.states == ["retired", "healthy"])
            # 1 + 2 + 4 + 8 + 16 seconds of waiting.
            assert loop.time() - began == pytest.approx(31, abs=0.5)
            assert victim.calls["start"] == 6
            assert victim.calls["kill"] == 6
            assert fleet.core.metrics()["restarts"] == 5
            await asyncio.sleep(1000)
            assert victim.calls["start"] == 6
            fleet.replicas[1].alive = False
            fleet.replicas[1].faults["start"] = [InfraError("r1: no memory")] * 9
            with pytest.raises(NoReplicaError, match="r0 retired, r1"):
                await fleet.core.generate(make_requests(2))

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert "replica r0: all its restarts are used" in caplog.text
