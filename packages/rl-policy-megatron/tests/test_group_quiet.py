"""What a script prints that makes a group by itself: nothing but its own lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SCRIPT = """
import os, sys, time
from dataclasses import dataclass
import ray, torch
from rl_policy_megatron import ParallelLayout, PolicySettings
from rl_policy_megatron.errors import RankError
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, RankSettings


@dataclass
class Rows:
    input_ids: torch.Tensor
    lengths: torch.Tensor

    def select(self, rows):
        return Rows(self.input_ids[rows], self.lengths[rows])


def mean(logits, batch):
    return -logits.logprobs().sum() / 12, {}


def failing(logits, batch):
    raise ZeroDivisionError


def hanging(logits, batch):
    time.sleep(60 * torch.distributed.get_rank())
    return mean(logits, batch)


def dying(logits, batch):
    if torch.distributed.get_rank():
        os._exit(7)
    return mean(logits, batch)


def group(**settings):
    ranks = RankSettings(sys.argv[1], PolicySettings(layout=ParallelLayout(tensor=2)), world=2, threads=1)
    return MegatronPolicyGroup(ranks, GroupSettings(num_cpus=0.5, **settings))


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    print("begun", flush=True)
    rows = Rows(torch.randint(0, 60, (2, 8)), torch.tensor([8, 6]))
    with group() as policy:
        policy.train(rows, mean, learning_rate=1e-3)
        try:
            policy.train(rows, failing, learning_rate=1e-3)
        except ZeroDivisionError:
            print("refused", flush=True)
        policy.train(rows, mean, learning_rate=1e-3)
    policy = group(call_timeout_s=2.0)
    try:
        policy.train(rows, hanging, learning_rate=1e-3)
    except RankError:
        print("ended", flush=True)
    policy = group()
    try:
        policy.train(rows, dying, learning_rate=1e-3)
    except RankError:
        print("dead", flush=True)
    # Ray's news of its workers come once in a while, and what nobody read when it is let go.
    del policy
    time.sleep(2)
    ray.shutdown()
    print("over", flush=True)
"""


def test_neither_success_nor_a_refusal_nor_a_failing_rank_makes_ray_talk(
    model_of: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    ran = subprocess.run(
        [sys.executable, str(script), str(model_of("qwen3-tied")[0])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        env={**os.environ, **loopback, "RL_ACTOR_ENVS_SYSTEM": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    # Before the first line Ray says that it has started.
    told = ran.stdout[ran.stdout.find("begun\n") :]
    assert told.startswith("begun\nrefused\nended\n"), ran.stdout
    # Of a worker that has died by itself Ray may tell, once, but not of the one that waited for it.
    lines = [line for line in told.splitlines() if "(raylet)" not in line]
    assert lines == ["begun", "refused", "ended", "dead", "over"], ran.stdout
    assert len(told.splitlines()) - len(lines) <= 1, ran.stdout
    assert ran.returncode == 0
