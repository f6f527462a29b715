"""Drive the controller through seeded histories: ``python -m tools.simulation.controller -h``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from rl_algorithms.controller import (
    ControllerSettings,
    InOrder,
    ReadyFirst,
    RetryPolicy,
    Sampler,
    StragglerPolicy,
    WeightFifo,
    Windowed,
)

from .world import Hazards, Outcome, World

_CHUNK = 250
_POLICIES: tuple[StragglerPolicy, ...] = ("wait", "replace", "shrink")


def history(seed: int) -> World:
    """The world of a seed: sizes, policies and hazards are drawn from it too."""
    draw = random.Random(seed)
    batch = draw.randint(1, 4)
    samplers: list[Sampler] = [InOrder(), Windowed(batch + draw.randint(0, 4)), ReadyFirst(), WeightFifo()]
    settings = ControllerSettings(
        steps=draw.randint(1, 6),
        prompts_per_step=batch,
        group_size=draw.randint(1, 3),
        max_staleness=draw.randint(0, 3),
        sampler=draw.choice(samplers),
        max_running=draw.choice([None, None, draw.randint(1, 6)]),
        retry=RetryPolicy(infra=draw.randint(0, 5), data=draw.randint(0, 2)),
        straggler=draw.choice(_POLICIES),
        straggler_timeout_s=draw.choice([1.0, 5.0, 20.0]),
        min_batch_fraction=draw.choice([0.25, 0.5, 1.0]),
        max_replays=draw.randint(0, 5),
        rollout_timeout_s=30.0,
        stall_timeout_s=200.0,
        evaluate_every=draw.randint(0, 3),
        checkpoint_every=draw.randint(0, 3),
        save_groups_every_s=draw.choice([None, 0.5, 3.0]),
        seed=seed,
    )

    def rate(*values: float) -> float:
        return draw.choice((0.0, *values))

    hazards = Hazards(
        infra=rate(0.05, 0.3),
        data=rate(0.05, 0.2),
        stuck=rate(0.02, 0.1),
        slow=rate(0.05, 0.2),
        twice=rate(0.1, 0.5),
        after_cancel=rate(0.2, 1.0),
        unknown_versions=rate(0.2, 1.0),
        kills=rate(1.0, 4.0),
        stops=rate(1.0),
        clock_jumps=rate(0.5, 3.0),
    )
    return World(settings, hazards, seed)


def run_seeds(first: int, count: int) -> Counter[str]:
    """Histories of these seeds; what happened in them, added up.

    Raises:
        Violation: with a note that names the seed.
    """
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            outcome = history(seed).run()
        except BaseException as error:
            error.add_note(f"history of seed {seed}")
            raise
        total.update(_numbers(outcome))
    return total


def _numbers(outcome: Outcome) -> dict[str, float]:
    names = ("kills", "stops", "jumps", "events", "refits_in_flight", "trained", "restored")
    return {"histories": 1, **{name: getattr(outcome, name) for name in names}, **outcome.counters}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    words = parser.parse_args()
    began = time.perf_counter()
    firsts = range(words.first, words.first + words.histories, _CHUNK)
    counts = [min(_CHUNK, words.first + words.histories - first) for first in firsts]
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(words.processes) as pool:
        for part in pool.map(run_seeds, firsts, counts):
            total.update(part)
    for name, number in total.items():
        print(f"{name:<20}{number:>14,.0f}")
    print(f"0 violations in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
