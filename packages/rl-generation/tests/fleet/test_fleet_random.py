"""Random lives of fleets: nothing is lost, answered twice or served by one that must not serve."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from rl_generation.failures import GenerationError, InfraError, NotReadyError, RefitError, RequestError
from rl_generation.fleet.settings import FleetSettings, RestartPolicy

TRIALS = 500


async def _misfortune(fleet: Any, rng: random.Random, refits: dict[str, int], source: type) -> None:
    """One thing that happens to a fleet; replicas die, hang, fail, are paused and get new weights."""
    replica = rng.choice(fleet.replicas)
    match rng.randrange(9):
        case 0 | 1:
            replica.alive = False
        case 2:
            replica.hung = True
        case 3:
            replica.faults["generate"] = [NotReadyError(f"{replica.name}: busy")] * rng.randrange(1, 3)
        case 4:
            step = rng.choice(["begin_refit", "load_bucket", "finish_refit", "abort_refit", "start", "probe"])
            replica.faults[step] = [rng.choice([InfraError, RefitError])(f"{replica.name}: {step}")]
        case 5 | 6:
            fails_at = rng.randrange(3) if rng.random() < 0.2 else None
            refits["version"] += 1
            try:
                await fleet.core.refit(source(fails_at), refits["version"])
                refits["done"] += 1
            except GenerationError:
                refits["failed"] += 1
        case 7:
            await fleet.core.refit_stale(source())
        case 8:
            await fleet.core.pause()
            await asyncio.sleep(rng.random())
            await fleet.core.resume()


def test_500_random_lives_of_a_fleet(run, scripted, source, make_requests) -> None:
    """No request is lost or answered twice, only the healthy are asked, and no old version is returned."""
    logging.disable(logging.CRITICAL)
    totals = {"answered": 0, "refused": 0, "done": 0, "failed": 0, "restarts": 0, "sent_again": 0}

    async def life(seed: int) -> None:
        rng = random.Random(seed)
        settings = FleetSettings(
            probe_interval_s=1.0,
            probe_timeout_s=0.2,
            replica_wait_s=20.0,
            request_timeout_s=60.0,
            refit_call_timeout_s=1.0,
            restarts=RestartPolicy(max_restarts=rng.randrange(1, 6)),
        )
        refits = {"version": 0, "done": 0, "failed": 0}
        async with scripted(rng.randrange(1, 5), settings) as fleet:
            for replica in fleet.replicas:
                replica.latency_s, replica.start_s = rng.random(), rng.random() * 3

            async def ask(index: int) -> None:
                await asyncio.sleep(rng.random() * 10)
                first, count = 1000 * index, rng.randrange(1, 12)
                began_with = fleet.core.version
                try:
                    answers = await fleet.core.generate(make_requests(count, first))
                except (InfraError, RequestError):
                    totals["refused"] += 1
                    return
                assert [answer.token_ids for answer in answers] == [(first + i,) for i in range(count)]
                assert min(answer.weight_version for answer in answers) >= began_with
                totals["answered"] += 1

            async def trouble() -> None:
                for _ in range(rng.randrange(1, 8)):
                    await asyncio.sleep(rng.random() * 2)
                    try:
                        await _misfortune(fleet, rng, refits, source)
                    except GenerationError:
                        continue

            async with asyncio.TaskGroup() as group:
                group.create_task(trouble())
                for index in range(rng.randrange(1, 8)):
                    group.create_task(ask(index))
            for replica in fleet.replicas:
                assert {state for state, _ in replica.served} <= {"healthy"}
                assert fleet.core._router.endpoint(replica.name).outstanding == 0
            if not refits["failed"]:
                assert fleet.core.version <= refits["version"]
            for name in ("restarts", "sent_again"):
                totals[name] += int(fleet.core.metrics()[name])
            totals["done"] += refits["done"]
            totals["failed"] += refits["failed"]

    try:
        for seed in range(TRIALS):
            try:
                run(life(seed))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    finally:
        logging.disable(logging.NOTSET)
    # The lives were eventful.
    assert totals["answered"] > 1000
    assert min(totals.values()) > 50, totals


@pytest.mark.parametrize("seed", range(3))
def test_a_life_repeats_itself(run, scripted, make_requests, seed: int) -> None:
    """Nothing in a fleet depends on real time or on numbers that are not seeded."""

    async def life() -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []
        rng = random.Random(seed)
        async with scripted(3, FleetSettings(probe_timeout_s=0.2)) as fleet:
            for name, member in fleet.core.members.items():
                member.machine.listen(lambda old, new, name=name: seen.append((name, str(new))))
            for _ in range(5):
                rng.choice(fleet.replicas).alive = False
                await fleet.core.generate(make_requests(6))
                await asyncio.sleep(rng.random() * 10)
        return seen

    first = run(life())
    assert first
    assert run(life()) == first
