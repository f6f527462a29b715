"""What a group of ranks does when one of them fails: who is named, how soon, and that nothing is left.

The ranks are real processes that meet in a real world of gloo; only the model in them is a double.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rl_policy_megatron import OptimizerSettings
from rl_policy_megatron.errors import BatchError, RankError, RuntimeStateError
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, PolicyRank, RankSettings
from rl_policy_megatron.group.rendezvous import Rendezvous, join
from rl_policy_megatron.refusals import alike

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

TITLE = "child-of-a-rank-of-the-group-test"


def no_source(spec: Any, stream: Any) -> Any:
    raise NotImplementedError


RANKS = RankSettings("nowhere", world=2, rendezvous_timeout_s=60.0, weight_source=no_source)
LIMITS = GroupSettings(num_cpus=0.5, start_timeout_s=90.0, call_timeout_s=60.0, shutdown_timeout_s=5.0)


@dataclass(frozen=True)
class Deed:
    """What a rank, or every one, does when it is told to train, in place of a loss."""

    rank: int | None
    how: str

    def __call__(self, logits: Any, batch: Any) -> Any:
        raise NotImplementedError


class Double(PolicyRank):
    """A rank without a model. The settings' model directory says what becomes of its start."""

    def start(self, rendezvous: Rendezvous | None = None) -> dict[str, Any]:
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", TITLE])
        fate, _, number = self._settings.model_directory.partition("@")
        if number == str(self._rank):
            if fate == "late":
                time.sleep(600)
            raise ValueError("config.json does not exist")
        assert rendezvous is not None
        limits = {
            "timeout_s": self._settings.rendezvous_timeout_s,
            "collective_timeout_s": self._settings.collective_timeout_s,
        }
        join(rendezvous, self._rank, self._settings.world, store=self._store, **limits)
        self._joined = True
        return {"pid": os.getpid(), "child": self._child.pid}

    def train(self, batch: Any, loss_fn: Any, learning_rate: float) -> Any:
        if loss_fn.rank in (self._rank, None):
            if loss_fn.how == "refuse":
                with alike():
                    raise BatchError("row 3 has no end")
            if loss_fn.how == "raise":
                raise ZeroDivisionError("the denominator of row 3 is 0")
            if loss_fn.how == "exit":
                os._exit(7)
            if loss_fn.how == "sleep":
                time.sleep(600)
        seen = torch.full((1,), float(loss_fn.rank or 0) if loss_fn.how == "sum" else 1.0)
        for _ in range(1 if loss_fn.how in ("nothing", "sum") else 10**9):
            dist.all_reduce(seen)
        return float(seen)

    def begin(self, transport: Any) -> str:
        return "begun"


class Doubles(MegatronPolicyGroup):
    rank_class = Double


@pytest.fixture
def start() -> Iterator[Callable[..., Doubles]]:
    """``start(model directory, **limits)`` → a group of two; afterwards none of its processes may run."""
    made: list[Doubles] = []

    def make(fate: str = "nowhere", ranks: RankSettings = RANKS, **limits: Any) -> Doubles:
        settings = replace(LIMITS, environment="rl_policy_megatron.group.rank.PolicyRank", **limits)
        made.append(Doubles(replace(ranks, model_directory=fate), settings, wait=False))
        made[-1].wait_until_started()
        return made[-1]

    yield make
    for group in made:
        group.shutdown()
        assert running(group) == []
    # Of ranks whose start failed nobody knows the children's numbers.
    assert children() == []


def children() -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if TITLE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def running(group: Doubles) -> list[int]:
    pids = [*group.pids, *([group.description["child"]] if group.description else [])]
    found: list[int] = []
    for pid in pids:
        # It may end at any moment, between two questions too.
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def failed(group: Doubles, deed: Deed) -> tuple[RankError, float]:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.train(None, deed, learning_rate=0.1)
    seconds = time.monotonic() - began
    # Before anybody asks for a shutdown.
    assert running(group) == []
    return caught.value, seconds


def test_the_rank_that_raised_is_named_and_not_the_one_that_waits_for_it(
    start: Callable[..., Doubles],
) -> None:
    group = start()
    assert len(running(group)) == 3
    error, seconds = failed(group, Deed(1, "raise"))
    assert str(error) == "rank 1 of 2: train failed: ZeroDivisionError: the denominator of row 3 is 0"
    assert (error.rank, error.call, error.answered) == (1, "train", True)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert seconds < 10
    with pytest.raises(RankError, match="reset_optimizer was called after a failure of train"):
        group.reset_optimizer(OptimizerSettings())


def test_ranks_that_refuse_together_go_on_and_ranks_that_only_raise_the_same_are_ended(
    start: Callable[..., Doubles],
) -> None:
    """The second may have been anywhere when they raised, and be behind each other by a collective."""
    group = start()
    for _ in range(2):
        with pytest.raises(BatchError, match="row 3 has no end") as caught:
            group.train(None, Deed(None, "refuse"), learning_rate=0.1)
        assert caught.value.__notes__ == ["BatchError of train, raised on rank 0 of 2"] or (
            caught.value.__notes__ == ["BatchError of train, raised on rank 1 of 2"]
        )
        assert len(running(group)) == 3
        assert group.train(None, Deed(21, "sum"), learning_rate=0.1) == 42.0
    error, seconds = failed(group, Deed(None, "raise"))
    assert str(error).endswith("train failed: ZeroDivisionError: the denominator of row 3 is 0")
    assert seconds < 10


def test_a_rank_that_refuses_what_another_does_is_ended_with_it(start: Callable[..., Doubles]) -> None:
    group = start()
    with pytest.raises(RankError, match="rank 1 of 2: train failed: BatchError"):
        group.train(None, Deed(1, "refuse"), learning_rate=0.1)
    assert running(group) == []


def test_a_rank_that_ends_itself_is_named_although_its_peer_complains_first(
    start: Callable[..., Doubles],
) -> None:
    error, seconds = failed(start(), Deed(1, "exit"))
    assert error.rank == 1
    assert "it died during train" in str(error)
    assert seconds < 10


def test_a_rank_that_hangs_is_told_by_the_deadline(start: Callable[..., Doubles]) -> None:
    error, seconds = failed(start(call_timeout_s=2.0), Deed(1, "sleep"))
    assert "train did not answer within 2 s" in str(error)
    assert "raise call_timeout_s" in str(error)
    assert seconds < 10


def test_a_rank_that_hangs_is_blamed_and_not_the_one_that_has_waited_for_it(
    start: Callable[..., Doubles],
) -> None:
    """In gloo's own words the one that waits has failed, and the other has closed nothing."""
    error, seconds = failed(start(ranks=replace(RANKS, collective_timeout_s=3.0)), Deed(1, "sleep"))
    assert str(error).startswith(
        "rank 1 of 2 did not answer within collective_timeout_s=3 s while rank 0 waited in train; "
    )
    assert (error.rank, error.call, error.answered) == (1, "train", False)
    assert seconds < 20


def test_a_rank_that_does_not_come_to_the_rendezvous_is_named(start: Callable[..., Doubles]) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 did not come to 127\.0\.0\.1:\d+ within 2 s") as caught:
        start("late@1", replace(RANKS, rendezvous_timeout_s=2.0))
    assert caught.value.rank == 1


def test_a_rank_that_cannot_load_its_model_is_told_by_its_own_error(start: Callable[..., Doubles]) -> None:
    """The other one is in the rendezvous for ever."""
    with pytest.raises(RankError, match=r"rank 1 of 2: start failed: ValueError: config\.json") as caught:
        start("broken@1")
    assert (caught.value.rank, caught.value.call) == (1, "start")


def test_ranks_that_find_no_room_are_told_by_the_deadline(start: Callable[..., Doubles]) -> None:
    with pytest.raises(RankError, match=r"starting its process did not answer within 1 s.*start_timeout_s"):
        start(num_cpus=100, start_timeout_s=1.0)


def test_calls_of_several_threads_reach_all_ranks_in_one_order(start: Callable[..., Doubles]) -> None:
    """Else two ranks would be in different collectives, for ever. And a refit has the ranks for itself."""
    group = start()
    sums: dict[int, Any] = {}

    def work(first: int) -> None:
        for number in range(first, first + 50):
            sums[number] = group.train(None, Deed(number, "sum"), learning_rate=0.1)

    threads = [threading.Thread(target=work, args=(first,)) for first in (100, 200, 300, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {number: 2.0 * number for number in sums}
    assert len(sums) == 200
    assert group.begin("shared_memory") == "begun"
    with pytest.raises(RuntimeStateError, match="begin was called during a refit"):
        group.begin("shared_memory")
    with pytest.raises(RuntimeStateError, match="train was called during a refit"):
        group.train(None, Deed(-1, "nothing"), learning_rate=0.1)
    assert group.weight_version() == 0
    group.end()
    assert group.train(None, Deed(-1, "nothing"), learning_rate=0.1) == 2.0
    group.shutdown()
    group.shutdown()
    assert running(group) == []
    with pytest.raises(RankError, match="after shutdown"):
        group.reset_optimizer(OptimizerSettings())


def test_leaving_the_block_with_an_exception_waits_for_no_busy_rank(start: Callable[..., Doubles]) -> None:
    group = start(shutdown_timeout_s=60.0)

    def train() -> None:
        with contextlib.suppress(RankError):
            group.train(None, Deed(-1, "for ever"), learning_rate=0.1)

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(1.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), group:
        raise KeyboardInterrupt
    assert time.monotonic() - began < 10
    assert running(group) == []
    thread.join(30)
    assert not thread.is_alive()
