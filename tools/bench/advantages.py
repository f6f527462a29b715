"""What advantages cost: microseconds per group, for each estimator.

python -m tools.bench.advantages
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from rl_algorithms.advantages import (
    GDPO,
    AdvantageEstimator,
    AdvantageInputs,
    GroupRelative,
    KLInReward,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    gae_advantages,
)
from rl_algorithms.batching import TrainBatch

TOKENS = 64

ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": GroupRelative(),
    "leave-one-out": GroupRelative(leave_one_out=True),
    "rloo": GroupRelative(leave_one_out=True, normalize=False),
    "dr_grpo": GroupRelative(normalize=False),
    "reinforce_plus_plus": ReinforcePlusPlus(),
    "gdpo": GDPO(),
    "opd": OnPolicyDistillation(),
    "grpo, KL in the reward": KLInReward(GroupRelative(), 0.1),
}


def made(groups: int, size: int) -> AdvantageInputs:
    """So many groups of random rollouts."""
    count = groups * size
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (count,), generator=generator).double()
    scores = -torch.rand(count, TOKENS, generator=generator)
    mask = torch.ones(count, TOKENS, dtype=torch.bool)
    mask[:, 0] = False
    batch = TrainBatch.create(
        input_ids=torch.ones(count, TOKENS, dtype=torch.int64),
        lengths=torch.full((count,), TOKENS),
        token_mask=mask,
        sample_mask=torch.ones(count, dtype=torch.bool),
        advantages=torch.zeros(count),
        generation_logprobs=scores,
    ).with_logprobs(prev=scores, reference=scores - 0.1, teacher=scores - 0.2)
    return AdvantageInputs(
        rewards=rewards,
        group_ids=[f"group-{row // size}" for row in range(count)],
        valid=torch.ones(count, dtype=torch.bool),
        batch=batch,
        components={"right": rewards, "format": 1 - rewards},
    )


def microseconds(call: Callable[..., object], *arguments: object, groups: int, repeats: int) -> float:
    """Median time of a call, per group."""
    call(*arguments)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - began)
    return round(1e6 * statistics.median(times) / groups, 2)


def measured(groups: int, size: int, repeats: int) -> dict[str, float]:
    """Of every estimator."""
    inputs = made(groups, size)
    found = {
        name: microseconds(estimator, inputs, groups=groups, repeats=repeats)
        for name, estimator in ESTIMATORS.items()
    }
    values, mask = inputs.batch.generation_logprobs, inputs.batch.loss_mask
    found["gae"] = microseconds(gae_advantages, inputs.rewards, values, mask, groups=groups, repeats=repeats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        f"us_per_group_of_{size}": measured(arguments.groups, size, arguments.repeats)
        for size in arguments.sizes
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
