"""The launcher of ranks itself: answers by rank, and failures that tell what happened."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist


def sum_of_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("the reason")
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    dist.barrier()


def linger() -> None:
    time.sleep(600)


def test_ranks_answer_many_calls_and_failures_name_rank_and_cause(ranks_of: Callable[[int], Any]) -> None:
    ranks = ranks_of(2)
    assert ranks.call("test_ranks:sum_of_ranks", offset=1) == [(0, 3.0), (1, 3.0)]
    first = ranks.pids
    assert ranks.call("test_ranks:sum_of_ranks", offset=2) == [(0, 5.0), (1, 5.0)]
    assert ranks.pids == first
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2: Traceback.*ValueError: the reason"):
        ranks.call("test_ranks:fail_on", rank=1, how="raise")
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2: died with exit code 7.*last words"):
        ranks.call("test_ranks:fail_on", rank=0, how="exit")
    with pytest.raises(AssertionError, match=r"rank 0 of 2: no answer within 0.2 s"):
        ranks.call("test_ranks:linger", seconds=0.2)
    assert ranks.pids == []
