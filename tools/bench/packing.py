"""How well the plan of micro-batches packs: groups of sequences ÷ the fewest possible, and its speed.

    python -m tools.bench.packing

The fewest possible is exact, by branch and bound, on small random instances of three kinds of lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from rl_policy_megatron.packing import plan_micro_batches
from rl_policy_megatron.settings import PolicySettings

CAPACITY = 1000


def exact(sizes: list[int], capacity: int) -> int:
    """The fewest bins of ``capacity`` that hold ``sizes``, by depth-first branch and bound."""
    order = sorted(sizes, reverse=True)
    # One each; the first descent, which fills the tightest bin, finds a good packing at once.
    best = len(order)
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def place(index: int, room: tuple[int, ...]) -> None:
        nonlocal best
        if len(room) >= best:
            return
        if index == len(order):
            best = len(room)
            return
        if _least(order[index:], list(room), capacity) >= best or (index, room) in seen:
            return
        seen.add((index, room))
        size = order[index]
        for left in sorted(set(room)):
            if size <= left:
                remaining = list(room)
                remaining.remove(left)
                place(index + 1, tuple(sorted([*remaining, left - size])))
                if left == size:
                    # A perfect fit is never worse than any other place.
                    return
        place(index + 1, tuple(sorted([*room, capacity - size])))

    place(0, ())
    return best


def _least(rest: list[int], room: list[int], capacity: int) -> int:
    """No fewer bins than this can hold what is left."""
    missing = sum(rest) - sum(room)
    return len(room) + max(-(-missing // capacity), 0)


def _uniform(rng: random.Random) -> int:
    return rng.randint(1, CAPACITY)


def _short(rng: random.Random) -> int:
    return rng.randint(1, CAPACITY // 2)


def _long_tail(rng: random.Random) -> int:
    return min(CAPACITY, max(1, int(rng.lognormvariate(5.3, 0.9))))


KINDS = {"uniform": _uniform, "short": _short, "long tail": _long_tail}


def quality(instances: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Mean and worst ratio to the optimum, by kind of lengths."""
    rng = random.Random(seed)
    found = {}
    for kind, draw in KINDS.items():
        ratios = []
        for _ in range(instances):
            sizes = [draw(rng) for _ in range(rng.randint(5, 25))]
            ratios.append(len(groups(sizes)) / exact(sizes, CAPACITY))
        found[kind] = {
            "mean": round(sum(ratios) / len(ratios), 4),
            "worst": round(max(ratios), 3),
            "optimal": round(sum(ratio == 1 for ratio in ratios) / len(ratios), 3),
        }
    return found


def groups(sizes: list[int], ranks: int = 1) -> list[list[int]]:
    """The micro-batches that the policy would run."""
    settings = PolicySettings(micro_batch_tokens=CAPACITY, packing=True)
    return [rows for rank in plan_micro_batches(sizes, settings, ranks) for rows in rank]


def seconds(count: int, seed: int = 0) -> dict[str, float]:
    """Time of one plan of so many sequences, by kind of lengths."""
    rng = random.Random(seed)
    found = {}
    for kind, draw in KINDS.items():
        sizes = [draw(rng) for _ in range(count)]
        began = time.perf_counter()
        plan = groups(sizes, ranks=8)
        found[kind] = round(time.perf_counter() - began, 3)
        assert sorted(row for rows in plan for row in rows) == list(range(count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=100_000)
    arguments = parser.parse_args()
    report = {
        "bins_over_optimum": quality(arguments.instances),
        f"seconds_for_{arguments.sequences}": seconds(arguments.sequences),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
