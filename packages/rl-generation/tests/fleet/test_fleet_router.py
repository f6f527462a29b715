"""Who gets the next request, what happens to requests of a replica that fails, and who is probed how."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter

import pytest

from rl_generation.failures import (
    DeadlineError,
    EngineDeadError,
    GenerationError,
    InfraError,
    NoReplicaError,
    NotReadyError,
    RequestError,
    UnschedulableError,
)
from rl_generation.fleet.member import Member
from rl_generation.fleet.probes import examine
from rl_generation.fleet.router import Router
from rl_generation.fleet.settings import FleetSettings, RestartPolicy
from rl_generation.fleet.states import ReplicaEvent, ReplicaMachine, TransitionError
from rl_generation.protocol import Completion


def healthy(name: str) -> ReplicaMachine:
    machine = ReplicaMachine(name, RestartPolicy(), lambda: 0.0)
    machine.fire(ReplicaEvent.STARTED_CURRENT)
    return machine


def test_the_least_outstanding_is_next_and_equals_take_turns() -> None:
    router = Router()
    for name in "abc":
        router.add(healthy(name))
    assert [next(iter(router.split(1))) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    router.endpoint("b").outstanding = 0
    assert router.split(2) == {"b": 2}
    assert router.split(0) == {}


def test_a_large_batch_levels_what_is_outstanding() -> None:
    router = Router()
    for name, outstanding in (("a", 10), ("b", 0), ("c", 4)):
        router.add(healthy(name)).outstanding = outstanding
    shares = router.split(10)
    assert shares == {"b": 7, "c": 3}
    assert sum(router.split(30).values()) == 30
    assert {router.endpoint(name).outstanding for name in "abc"} == {18}


def test_f5_a_replica_that_comes_back_under_its_name_starts_from_nothing() -> None:
    router = Router()
    machines = {name: healthy(name) for name in "ab"}
    for machine in machines.values():
        router.add(machine)
    router.endpoint("a").outstanding = 7
    machines["a"].fire(ReplicaEvent.FAILED)
    assert router.serving == ["b"]
    router.remove("a")
    with pytest.raises(ValueError, match="there is a replica 'b' already"):
        router.add(healthy("b"))
    router.add(healthy("a"))
    assert router.endpoint("a").machine.failures == 0
    assert router.endpoint("a").outstanding == 0
    sent = Counter(next(iter(router.split(1))) for _ in range(10))
    assert sent == {"a": 5, "b": 5}


def test_nobody_healthy_is_a_typed_error_with_every_state() -> None:
    router = Router()
    router.add(healthy("a")).machine.fire(ReplicaEvent.OUTDATED)
    with pytest.raises(NoReplicaError, match="no replica can serve \\(a stale\\)"):
        router.split(1)


@pytest.mark.parametrize("concurrent", [1, 8])
def test_f4_a_killed_replica_costs_at_most_three_calls_and_then_none(
    run, scripted, make_requests, concurrent: int
) -> None:
    """4 replicas, 1 killed, 1,000 requests; nobody restarts it meanwhile."""
    settings = FleetSettings(probe_interval_s=3600, restarts=RestartPolicy(max_restarts=0))

    async def scene() -> None:
        async with scripted(4, settings) as fleet:
            victim = fleet.replicas[2]
            victim.alive = False
            slots = asyncio.Semaphore(concurrent)

            async def ask(index: int) -> Completion:
                async with slots:
                    return (await fleet.core.generate(make_requests(1, first=index)))[0]

            answers = await asyncio.gather(*(ask(i) for i in range(1000)))
            assert [answer.token_ids for answer in answers] == [(i,) for i in range(1000)]
            assert 1 <= len(victim.served) <= 3
            assert fleet.core.metrics()["failed_calls"] == len(victim.served)
            before = len(victim.served)
            await fleet.core.generate(make_requests(100))
            assert len(victim.served) == before
            others = [len(replica.served) for replica in fleet.replicas if replica is not victim]
            assert max(others) - min(others) <= 3

    run(scene())


def test_one_batch_is_one_call_per_replica_and_keeps_its_order(run, scripted, make_requests) -> None:
    async def scene() -> None:
        async with scripted(3) as fleet:
            fleet.replicas[1].faults["generate"] = [NotReadyError("r1: it still loads")]
            answers = await fleet.core.generate(make_requests(100))
            assert [answer.token_ids[0] for answer in answers] == list(range(100))
            # Only the failed third was sent again, in one call to each of the others.
            assert [replica.calls["generate"] for replica in fleet.replicas] == [2, 1, 2]
            assert sum(len(replica.served) for replica in fleet.replicas) == 133
            metrics = fleet.core.metrics()
            assert (metrics["sent_again"], metrics["failed_calls"], metrics["requests"]) == (33, 1, 100)
            assert metrics["tokens"] == 100
            assert metrics["tokens_per_second"] == pytest.approx(100 / 0.01, rel=0.01)

    run(scene())


def test_a_request_at_fault_is_loud_and_never_sent_again(run, scripted, make_requests) -> None:
    async def scene(error: Exception) -> None:
        async with scripted(3) as fleet:
            fleet.replicas[1].faults["generate"] = [error]
            with pytest.raises(type(error)) as caught:
                await fleet.core.generate(make_requests(9))
            assert caught.value is error
            assert sum(replica.calls.get("generate", 0) for replica in fleet.replicas) == 3
            assert fleet.states == ["healthy"] * 3
            assert {fleet.core._router.endpoint(r.name).outstanding for r in fleet.replicas} == {0}

    run(scene(RequestError("prompt too long")))
    # What nobody classified is a fault of the data.
    run(scene(ZeroDivisionError("bug")))


def test_too_few_answers_name_the_replica(run, scripted, make_requests) -> None:
    async def scene() -> None:
        async with scripted(1) as fleet:
            fleet.replicas[0].generate = lambda requests: _none()
            with pytest.raises(GenerationError, match="replica r0: 0 answers to 2 requests"):
                await fleet.core.generate(make_requests(2))

    async def _none() -> list[Completion]:
        return []

    run(scene())


def test_the_budget_of_failures_ends_with_the_first_cause(run, scripted, make_requests) -> None:
    settings = FleetSettings(infra_budget=5, probe_interval_s=0.001)

    async def scene() -> None:
        async with scripted(2, settings) as fleet:
            for replica in fleet.replicas:
                replica.faults["generate"] = [InfraError(f"{replica.name}: number {i}") for i in range(9)]
            with pytest.raises(NoReplicaError, match=r"failed on 6 replicas in turn.*first cause") as caught:
                await fleet.core.generate(make_requests(1))
            assert "number 0" in str(caught.value.__cause__)
            assert sum(replica.calls["generate"] for replica in fleet.replicas) == 6

    run(scene())


def test_a_replica_that_answers_probes_and_no_request_is_ended(run, scripted, make_requests) -> None:
    settings = FleetSettings(infra_budget=2, probe_interval_s=0.001)

    async def scene() -> None:
        async with scripted(1, settings) as fleet:
            fleet.replicas[0].faults["generate"] = [InfraError(f"number {i}") for i in range(3)]
            with pytest.raises(NoReplicaError):
                await fleet.core.generate(make_requests(1))
            assert fleet.states == ["dead"]
            await fleet.until(lambda: fleet.states == ["healthy"])

    run(scene())


@pytest.mark.parametrize("apart_s", [0.0, 0.5])
def test_calls_that_were_in_flight_together_are_one_incident(
    run, scripted, make_requests, apart_s: float
) -> None:
    """A node that is away for a moment, with more calls in flight than the budget has failures."""

    async def scene() -> None:
        async with scripted(2) as fleet:
            victim, failing = fleet.replicas[0], iter(range(7))
            original = victim.generate

            async def lost(requests):
                if (number := next(failing, None)) is None:
                    return await original(requests)
                await asyncio.sleep(1 + number * apart_s)
                raise InfraError("r0: its node does not answer")

            victim.generate = lost
            calls = [fleet.core.generate(make_requests(1, first)) for first in range(14)]
            answers = await asyncio.gather(*calls)
            assert [answer.token_ids for (answer,) in answers] == [(first,) for first in range(14)]
            assert fleet.states == ["healthy"] * 2
            assert (victim.calls.get("kill", 0), fleet.core.metrics()["failed_calls"]) == (0, 7)
            assert victim.calls["probe"] >= 1

    run(scene())


def test_work_that_is_too_much_for_the_callers_deadline_is_no_replicas_fault(
    run, scripted, make_requests
) -> None:
    settings = FleetSettings(request_timeout_s=5.0, infra_budget=0, probe_interval_s=3600)

    async def scene() -> None:
        async with scripted(2, settings) as fleet:
            for replica in fleet.replicas:
                replica.latency_s = 6.0
            calls = [fleet.core.generate(make_requests(1, first)) for first in range(14)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {DeadlineError}
            assert fleet.states == ["healthy"] * 2
            # But whoever hangs is found.
            fleet.replicas[0].hung = True
            await fleet.until(lambda: fleet.replicas[0].calls.get("probe", 0) > 0)

    run(scene())


def test_requests_wait_for_a_replica_and_not_for_ever(run, scripted, make_requests) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(2) as fleet:
            for replica in fleet.replicas:
                replica.alive = False
            # No refit ever was, so the restarted ones may serve.
            assert len(await fleet.core.generate(make_requests(4))) == 4
            for replica in fleet.replicas:
                replica.alive, replica.start_s = False, 1000.0
            began = loop.time()
            with pytest.raises(NoReplicaError, match="no replica could serve for 60 s") as caught:
                await fleet.core.generate(make_requests(1))
            assert 60 <= loop.time() - began < 62
            assert isinstance(caught.value.__cause__, EngineDeadError)

    run(scene())


def test_the_deadline_bounds_everything(run, scripted, make_requests) -> None:
    settings = FleetSettings(request_timeout_s=7.0, probe_interval_s=3600)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(2, settings) as fleet:
            fleet.replicas[1].hung = True
            began = loop.time()
            with pytest.raises(DeadlineError, match="5 of 10 requests have no answer after 7 s"):
                await fleet.core.generate(make_requests(10))
            assert loop.time() - began == pytest.approx(7.0, abs=0.01)

    run(scene())


def test_a_hung_replica_is_found_by_probes_and_its_requests_go_elsewhere(
    run, scripted, make_requests
) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(2) as fleet:
            fleet.replicas[0].hung = True
            began = loop.time()
            answers = await fleet.core.generate(make_requests(10))
            assert [answer.token_ids[0] for answer in answers] == list(range(10))
            # Two rounds of probes, 5 s apart, 0.2 s each.
            assert loop.time() - began < 11
            assert fleet.replicas[0].calls["kill"] == 1
            await fleet.until(lambda: fleet.states == ["healthy"] * 2)

    run(scene())


def test_a_caller_who_gives_up_leaves_nothing_outstanding(run, scripted, make_requests) -> None:
    async def scene() -> None:
        async with scripted(2) as fleet:
            for replica in fleet.replicas:
                replica.latency_s = 100.0
            call = asyncio.ensure_future(fleet.core.generate(make_requests(10)))
            await asyncio.sleep(1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert {fleet.core._router.endpoint(r.name).outstanding for r in fleet.replicas} == {0}
            assert fleet.core.metrics()["seconds"] == pytest.approx(1.0)

    run(scene())


@pytest.mark.parametrize("steps", range(4))
def test_giving_up_at_once_leaves_nothing_outstanding_either(
    run, scripted, make_requests, steps: int
) -> None:
    async def scene() -> None:
        async with scripted(3) as fleet:
            call = asyncio.ensure_future(fleet.core.generate(make_requests(10)))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert {fleet.core._router.endpoint(r.name).outstanding for r in fleet.replicas} == {0}

    run(scene())


def test_f9_sixteen_hung_replicas_are_found_within_one_timeout(scripted_replica, stopwatch) -> None:
    """In real time: probe timeout 0.2 s, all flagged within 0.5 s; in series it would be 3.2 s."""

    async def scene() -> None:
        members = [Member(scripted_replica(f"r{i}"), RestartPolicy(), lambda: 0.0) for i in range(17)]
        for member in members:
            member.replica.alive, member.replica.hung = True, member.name != "r16"
        began = stopwatch()
        verdicts = await examine(members, 0.2)
        assert 0.2 <= stopwatch() - began <= 0.5
        assert [verdicts[member].alive for member in members] == [False] * 16 + [True]
        assert "r0: no answer to a probe within 0.2 s" in str(verdicts[members[0]].error)

    asyncio.run(scene())


def test_f9_the_fleet_quarantines_all_of_them_in_that_time(run, scripted) -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        async with scripted(16) as fleet:
            for replica in fleet.replicas:
                replica.hung = True
            began = loop.time()
            await fleet.core._supervisor.probe_once()
            assert fleet.states == ["suspect"] * 16
            assert loop.time() - began <= 0.5

    run(scene())


def test_busy_with_real_work_is_not_hung(run, scripted, make_requests) -> None:
    """Progress counts: tokens delivered meanwhile, or the engine's own count of sampled ones."""

    async def scene() -> None:
        async with scripted(3) as fleet:
            delivers, counts, hangs = fleet.replicas
            for replica in fleet.replicas:
                replica.hangs.add("probe")
            delivers.latency_s = 0.05
            counts.latency_s = hangs.latency_s = 1000.0
            ticking = iter(range(10**6))

            async def health() -> dict[str, int]:
                return {"sampled_tokens": next(ticking)}

            async def still() -> dict[str, int]:
                return {"sampled_tokens": 12}

            counts.health, hangs.health = health, still
            calls = [asyncio.ensure_future(fleet.core.generate(make_requests(1))) for _ in range(3)]
            more = asyncio.ensure_future(_keep_busy(fleet, delivers, make_requests))
            await asyncio.sleep(0.01)
            await fleet.core._supervisor.probe_once()
            assert fleet.states == ["healthy", "healthy", "suspect"]
            more.cancel()
            for call in calls:
                call.cancel()
            await asyncio.wait({*calls, more})

    async def _keep_busy(fleet, replica, make) -> None:
        while True:
            member = fleet.core.members[replica.name]
            member.tokens += len(await replica.generate(make(1)))

    run(scene())


@pytest.mark.parametrize("grows", [True, False])
def test_work_that_outlasts_the_engines_own_deadline_of_a_probe_is_not_its_death(
    run, scripted, grows: bool
) -> None:
    """And work that came over HTTP, of which the fleet knows nothing, counts as any other."""

    async def scene() -> None:
        async with scripted(1) as fleet:
            (replica,), sampled = fleet.replicas, iter(range(10**6))

            async def probe() -> None:
                await asyncio.sleep(0.1)
                raise DeadlineError("r0: a probe did not end within 0.1 s")

            async def health() -> dict[str, int]:
                return {"sampled_tokens": next(sampled) if grows else 12}

            replica.probe, replica.health = probe, health
            for _ in range(3):
                await fleet.core._supervisor.probe_once()
            assert fleet.states == ["healthy" if grows else "dead"]

    run(scene())


def test_a_suspect_recovers_by_a_probe_and_a_dead_one_is_not_waited_for(run, scripted) -> None:
    async def scene() -> None:
        async with scripted(3) as fleet:
            fleet.replicas[0].faults["probe"] = [NotReadyError("r0: busy")]
            fleet.replicas[1].faults["probe"] = [EngineDeadError("r1: gone")]
            await fleet.core._supervisor.probe_once()
            assert fleet.states == ["suspect", "dead", "healthy"]
            await fleet.core._supervisor.probe_once()
            assert fleet.states[0] == "healthy"

    run(scene())


def test_failures_survive_pickling() -> None:
    for error in (TransitionError, UnschedulableError):
        copy = pickle.loads(pickle.dumps(error("fleet: because")))
        assert (type(copy), str(copy)) == (error, "fleet: because")
