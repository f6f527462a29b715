"""The parts of a group that need no processes of their own: who is to blame, refits in step, what is left."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_policy_megatron import MegatronPolicy, ParallelLayout, PolicySettings
from rl_policy_megatron.errors import PeerError, RankError, RendezvousError, RuntimeStateError
from rl_policy_megatron.group import GroupSettings, MegatronPolicyGroup, PolicyRank, RankSettings
from rl_policy_megatron.group.answers import Answers
from rl_policy_megatron.group.blame import dead, failure_of, first_of
from rl_policy_megatron.group.lockstep import FollowingSide, LeadingSide
from rl_policy_megatron.group.portable import portable
from rl_policy_megatron.group.processes import ProcessPlace, end_all, this_machine


def raised(error: Exception) -> Any:
    """As Ray hands over what an actor raised."""
    from ray.exceptions import RayTaskError

    return RayTaskError("train", "a long traceback", error)


GLOO = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
)
BROKEN = dist.DistNetworkError("The client socket has failed to connect")


@pytest.mark.parametrize("follower", [GLOO, BROKEN, PeerError("rank 0 of 2 failed: x", 0)])
def test_who_only_saw_another_fail_is_not_to_blame(follower: Exception) -> None:
    first = failure_of(1, "train", raised(follower))
    assert first.follows
    real = failure_of(0, "train", raised(ValueError("the reason")))
    assert first_of([first, real]) is real
    assert first_of([first, dead(0, "train")]).rank == 0
    error = first_of([first, real]).raised("train", 2)
    assert str(error) == "rank 0 of 2: train failed: ValueError: the reason"


def test_of_real_failures_the_first_counts() -> None:
    failures = [failure_of(rank, "train", raised(ValueError(str(rank)))) for rank in (2, 0, 1)]
    assert first_of(failures).rank == 2


def test_if_all_only_saw_another_fail_the_one_they_name_is_told() -> None:
    failures = [
        failure_of(0, "train", raised(GLOO)),
        failure_of(1, "train", raised(PeerError("it failed", 3))),
    ]
    error = first_of(failures).raised("train", 4)
    assert (error.rank, str(error)) == (3, "rank 3 of 4: train failed: it failed")
    late = failure_of(0, "start", raised(RendezvousError("rank 2 of 4 did not come", (2,))))
    assert late.raised("start", 4).rank == 2


def test_what_a_peer_passes_on_is_said_once() -> None:
    heard = failure_of(0, "train", raised(PeerError("rank 1 of 2 failed: KeyError: 'x'", 1)))
    assert str(heard.raised("train", 2)) == "rank 1 of 2: train failed: KeyError: 'x'"


LATE = "[/__w/b/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"


def told(*failures: Any, silent: tuple[int, ...] = (), world: int = 2) -> RankError:
    answers = Answers("logprobs", world, 60.0, "call_timeout_s", 20.0, failures=list(failures))
    answers.silent += silent
    with pytest.raises(RankError) as caught:
        answers.results()
    return caught.value


def test_who_waited_in_vain_is_not_to_blame_but_who_gave_no_answer() -> None:
    late = failure_of(0, "logprobs", raised(RuntimeError(LATE)))
    error = told(late, silent=(1,))
    assert str(error).startswith(
        "rank 1 of 2 did not answer within collective_timeout_s=20 s while rank 0 waited in logprobs; "
    )
    assert (error.rank, error.call, error.answered) == (1, "logprobs", False)
    assert "unbound_buffer" in str(error.__cause__)
    assert "ranks 1, 3 of 4 did not answer" in str(told(late, silent=(3, 1), world=4))
    # Whoever heard of it from the one that waited knows no more.
    heard = failure_of(2, "logprobs", raised(PeerError("rank 0 of 4 failed: RuntimeError: late", 0)))
    assert told(heard, late, silent=(1,), world=4).rank == 1
    short = failure_of(0, "logprobs", raised(RuntimeError(LATE.replace("20000", "1500"))))
    assert "did not answer within 1.5 s while" in str(told(short, silent=(1,)))
    both = told(late, failure_of(1, "logprobs", raised(RuntimeError(LATE))))
    assert str(both).startswith(
        "ranks 0, 1 of 2 waited in logprobs for longer than collective_timeout_s=20 s"
    )
    assert (both.rank, both.answered) == (-1, True)


def test_a_wait_in_vain_gives_way_to_what_tells_more() -> None:
    late = failure_of(0, "logprobs", raised(RuntimeError(LATE)))
    assert str(told(late, dead(1, "logprobs"))).startswith("rank 1 of 2: it died")
    assert "ValueError: the reason" in str(told(late, failure_of(1, "x", raised(ValueError("the reason")))))
    assert not failure_of(0, "train", raised(RuntimeError("timed out waiting for a reward"))).follows


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Some NCCL operations have failed or timed out."),
        dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
        dist.DistStoreError("wait timeout after 20000ms, keys: /a"),
    ],
)
def test_nccl_and_the_store_wait_in_vain_as_well(error: Exception) -> None:
    assert told(failure_of(0, "logprobs", raised(error)), silent=(1,)).rank == 1


class Weird(Exception):
    """Pickles, and cannot be read again."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)


class Holding(Exception):
    """Does not even pickle."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "text"), [(Weird("row 3", "b"), "Weird: row 3 "), (Holding(), "Holding: holds a lock ")]
)
def test_an_exception_that_does_not_survive_pickling_is_told_by_name_and_text(
    error: Exception, text: str
) -> None:
    class Raising(PolicyRank):
        def keep_reference(self) -> None:
            raise error

    rank = Raising(RankSettings("m"))
    with pytest.raises(RankError, match=f"keep_reference raised {text}") as caught:
        rank.perform(1, "keep_reference")
    assert caught.value.__cause__ is error
    assert rank.standing(1).unharmed
    again = pickle.loads(pickle.dumps(caught.value))
    failure = failure_of(1, "keep_reference", raised(again))
    assert failure.answered
    assert not failure.follows
    assert failure.original("keep_reference", 2) is None
    assert str(failure.raised("keep_reference", 2)).startswith(f"rank 1 of 2: keep_reference raised {text}")


def test_an_exception_that_survives_is_left_as_it_is() -> None:
    for error in (ZeroDivisionError("x"), RankError("x", 1), KeyError("k")):
        assert portable(error, "train") is error


def test_a_failed_disk_is_a_real_failure_whatever_its_words() -> None:
    assert not failure_of(0, "save", raised(OSError("Broken pipe"))).follows


def test_errors_survive_the_way_between_processes() -> None:
    for error in (
        RankError("rank 1 of 2: gone", 1, "train", answered=True),
        RendezvousError("rank 1 did not come", (1, 3)),
        PeerError("rank 1 failed", 1),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RankSettings("m", world=0), "world must be an integer >= 1"),
        (lambda: RankSettings("m", threads=-1), "threads must be an integer >= 0"),
        (
            lambda: RankSettings("m", refit_timeout_s=0),
            "refit_timeout_s must be a finite number > 0",
        ),
        (lambda: GroupSettings(num_gpus=-1), "num_gpus must be a finite number >= 0"),
        (lambda: GroupSettings(call_timeout_s=float("inf")), "call_timeout_s must be a finite number"),
    ],
)
def test_settings_outside_their_range_are_named(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_world_that_cannot_hold_the_layout_is_refused() -> None:
    with pytest.raises(RuntimeStateError, match="a multiple of 2"):
        RankSettings("m", PolicySettings(layout=ParallelLayout(tensor=2)), world=3)


def test_importing_the_group_imports_no_ray() -> None:
    code = "import sys, rl_policy_megatron.group; assert not {'ray', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_a_cluster_it_says_how_to_get_one() -> None:
    import ray

    assert not ray.is_initialized()
    with pytest.raises(RuntimeStateError, match=r"call ray\.init first"):
        MegatronPolicyGroup(RankSettings("nowhere"))


class Source:
    """Hands out tensors two by two."""

    def __init__(self, spec: Callable[[], Any], stream: Callable[[], Iterator[Any]]) -> None:
        self.stream = stream

    def begin(self, transport: Any) -> str:
        if transport == "no such":
            raise ValueError("there is no such transport")
        self.reading = self.stream()
        return f"by {transport}"

    def next_bucket(self) -> list[Any] | None:
        return [item for _, item in zip(range(2), self.reading, strict=False)] or None

    def end(self) -> None:
        # As a real one does: it lets go of the stream, which closes generators half-way.
        self.reading = None


def counted(read: list[str], names: str = "abcde") -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            read.append(name)
            yield name, torch.zeros(1)

    return stream


@pytest.mark.parametrize("buckets", [0, 1, 2, 3])
def test_rank_0_reads_on_to_the_end_wherever_a_refit_stops(buckets: int) -> None:
    """The other ranks are in the collectives of the rest."""
    read: list[str] = []
    side = LeadingSide(Source, list, counted(read))
    for _ in range(2):
        read.clear()
        assert side.begin("hand") == "by hand"
        for _ in range(buckets):
            side.next_bucket()
        side.end()
        assert read == list("abcde")
        side.end()
        assert read == list("abcde")


def test_rank_0_reads_on_although_the_refit_could_not_begin() -> None:
    read: list[str] = []
    side = LeadingSide(Source, list, counted(read))
    with pytest.raises(ValueError, match="no such transport"):
        side.begin("no such")
    side.end()
    assert read == list("abcde")


def test_the_others_read_all_of_it_by_themselves_and_tell_what_went_wrong() -> None:
    read: list[str] = []
    side = FollowingSide(counted(read), timeout_s=10)
    side.begin("hand")
    assert side.next_bucket() is None
    side.end()
    assert read == list("abcde")
    side.end()

    def failing() -> Iterator[Any]:
        yield "a", torch.zeros(1)
        raise ZeroDivisionError("the reason")

    side = FollowingSide(failing, timeout_s=10)
    side.begin("hand")
    with pytest.raises(ZeroDivisionError):
        side.end()
    hanging = FollowingSide(lambda: iter(lambda: time.sleep(30), 0), timeout_s=0.1)
    hanging.begin("hand")
    with pytest.raises(RuntimeStateError, match=r"not through 0\.1 s after its end"):
        hanging.end()


def test_a_rank_by_itself_says_what_it_lacks(tmp_path: Path) -> None:
    rank = PolicyRank(RankSettings(str(tmp_path)))
    with pytest.raises(RuntimeStateError, match="not started"):
        rank.keep_reference()
    rank.end()
    rank.shutdown()


LEADER = """
import subprocess, sys, time
from rl_policy_megatron.group.processes import ProcessPlace
ProcessPlace.settle()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
subprocess.Popen(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""


def started() -> tuple[subprocess.Popen[str], ProcessPlace]:
    """A leader of a group of four: a child, and a grandchild behind a shell."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    with open(f"/proc/{leader.pid}/stat", encoding="utf-8") as file:
        born = int(file.read().rpartition(")")[2].split()[19])
    return leader, ProcessPlace(this_machine(), leader.pid, born)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked at in /proc")
def test_i1_children_of_a_rank_end_with_it_also_when_it_died_before() -> None:
    leader, place = started()
    deadline = time.monotonic() + 20
    while len(place.left()) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(place.left()) == 4
    assert not place.died
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait(10)
    assert place.died
    assert len(place.left()) == 3
    assert end_all([place], 10.0) == []
    assert place.left() == []


def test_a_process_of_another_machine_or_of_another_birth_is_left_alone() -> None:
    mine = ProcessPlace("elsewhere", os.getpid(), 1)
    assert (mine.here, mine.died, mine.left()) == (False, False, [])
    other = ProcessPlace(this_machine(), os.getpid(), 1)
    assert (other.here, other.died, other.left()) == (True, True, [])
    assert end_all([mine, other], 1.0) == []


def test_a_bucket_is_refused_without_a_source_and_outside_a_refit() -> None:
    group = object.__new__(MegatronPolicyGroup)
    group.__dict__.update(_has_source=False, _refitting=False)
    for ask in (group.next_bucket, lambda: group.begin("by value")):
        with pytest.raises(RuntimeStateError, match="give RankSettings a weight_source"):
            ask()
    group.__dict__.update(_has_source=True)
    with pytest.raises(RuntimeStateError, match="outside a refit; call begin first"):
        group.next_bucket()


def test_a_group_offers_all_that_a_policy_does_but_its_model() -> None:
    offered = {name for name in vars(MegatronPolicyGroup) if not name.startswith("_")}
    assert {name for name in vars(MegatronPolicy) if not name.startswith("_")} - offered == {"model"}


def test_a_refit_that_cannot_begin_is_ended_and_bars_nothing() -> None:
    """Without ranks: what the driver's side asks of them."""
    group = object.__new__(MegatronPolicyGroup)
    asked: list[str] = []

    def call(method: str, *arguments: object) -> None:
        asked.append(method)
        if method == "begin":
            raise RankError("rank 0: begin: no room")

    group.__dict__.update(
        _has_source=True, _refitting=False, _ranks=SimpleNamespace(running=True), _call=call
    )
    for _ in range(2):
        with pytest.raises(RankError, match="no room"):
            group.begin("shared_memory")
    assert asked == ["begin", "end"] * 2
    assert not group._refitting
